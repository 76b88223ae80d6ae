"""What `kdist.scope` is given, by the code and by the launch's environment: filled in, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdist.errors import ScopeError, StrategyError
from kdist.strategies.choice import ENGINES, WORDS
from kdist.strategies.options import TPU, AllReduce, ParameterServer

STALL_TIMEOUT = 600.0
"""Seconds for which a rank may keep the others waiting, unless the user says otherwise."""

# How an environment variable's text becomes each argument's value.
_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}


def _number_or_word(text: str) -> str | float | None:
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        return text


def with_environment(given: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """Fills what the code leaves open from the launch's `KDIST_*` variables.

    Args:
        given: mapping of the scope's arguments' names to their values.
        env: mapping, the environment.

    Raises:
        ScopeError: if the launch contradicts the code.
        StrategyError: if a variable is not understood.
    """
    defaults = {
        "strategy": "auto",
        "scale_batch": True,
        "scale_lr": "auto",
        "warmup_epochs": "auto",
        "auto_shard": True,
        "stall_timeout": STALL_TIMEOUT,
    }
    chosen = dict(given)
    for name, default in defaults.items():
        variable = f"KDIST_{name.upper()}"
        if variable not in env:
            continue
        text = env[variable]
        value: Any = text
        if isinstance(default, bool):
            if text.lower() not in _BOOLEANS:
                raise StrategyError(
                    f"{variable} is not understood. Received: {variable}={text!r}. Expected 0, 1, true or false. "
                    "Fix: set one of these, or unset it."
                )
            value = _BOOLEANS[text.lower()]
        elif name != "strategy":
            value = _number_or_word(text)
        if name == "strategy" and getattr(given[name], "word", None) == value:
            continue  # the same, with options of its own
        if given[name] not in (default, value):
            raise ScopeError(
                f"The launch contradicts the code. Received: {variable}={text!r} and "
                f"kdist.scope({name}={given[name]!r}). Expected at most one of them, or the same in both. "
                f"Fix: unset {variable}, or leave {name} out of the code."
            )
        chosen[name] = value
    return chosen


def check(chosen: Mapping[str, Any], env: Mapping[str, str]) -> None:
    """Refuses what no scope can be asked for.

    Args:
        chosen: mapping of the scope's arguments' names to their values.
        env: mapping, the environment, for what to say.

    Raises:
        ScopeError: if Keras does not run on TensorFlow.
        StrategyError: if the strategy or a setting is unknown.
    """
    strategy = chosen["strategy"]
    if isinstance(strategy, AllReduce) and strategy.engine not in ("auto", *ENGINES):
        raise StrategyError(
            f"Unknown engine. Received: AllReduce(engine={strategy.engine!r}). Expected one of "
            f"{', '.join(map(repr, ('auto', *ENGINES)))}. Fix: choose one."
        )
    if isinstance(strategy, ParameterServer) and (problem := strategy.problem()):
        raise StrategyError(f"Impossible options. Received: {problem}. Fix: change it in kdist.ParameterServer(...).")
    if not isinstance(strategy, (str, AllReduce, ParameterServer, TPU)) and not hasattr(strategy, "extended"):
        raise StrategyError(
            f"`strategy` is of no known kind. Received: strategy={strategy!r} of type {type(strategy).__name__}. "
            f"Expected one of {', '.join(map(repr, WORDS))}, a kdist.AllReduce, a kdist.ParameterServer, a kdist.TPU "
            "or a tf.distribute.Strategy. Fix: choose one of these."
        )
    patience = chosen["stall_timeout"]
    if patience is not None and (isinstance(patience, (str, bool)) or not patience > 0):
        raise StrategyError(
            f"`stall_timeout` is no time. Received: stall_timeout={patience!r}. Expected seconds, above 0, or None. "
            "Fix: give a number of seconds, or None to wait for ever."
        )
    from kdist.scaling import learning_rate_rule, num_warmup_steps

    try:
        learning_rate_rule(chosen["scale_lr"], "SGD", 2, scale_batch=True)
        num_warmup_steps(chosen["warmup_epochs"], 1, 1)
    except ValueError as error:
        raise StrategyError(str(error)) from error
    _check_backend(env)


def _check_backend(env: Mapping[str, str]) -> None:
    import keras

    backend = keras.config.backend()
    if backend != "tensorflow":
        raise ScopeError(
            f"kdist trains on Keras' TensorFlow backend. Received: the backend {backend!r} "
            f"(KERAS_BACKEND={env.get('KERAS_BACKEND', 'unset')}). Expected 'tensorflow'. "
            "Fix: KERAS_BACKEND=tensorflow, or keras.distribution for JAX."
        )
