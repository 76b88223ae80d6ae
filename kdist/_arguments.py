"""What `kdist.scope` is given, by the code and by the launch's environment: filled in, and checked."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kdist.errors import ScopeError, StrategyError
from kdist.scaling import is_learning_rate_scale, is_warmup
from kdist.strategies.choice import ENGINES, WORDS
from kdist.strategies.options import TPU, AllReduce, ParameterServer, is_positive

STALL_TIMEOUT = 600.0
"""Seconds for which a rank may keep the others waiting, unless the user says otherwise."""

# What each setting may be, and how that is said.
_FIT: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "scale_batch": (lambda value: isinstance(value, bool), "True or False"),
    "scale_lr": (is_learning_rate_scale, '"auto", "linear", "sqrt", a positive number or None'),
    "warmup_epochs": (is_warmup, '"auto" or a number that is not negative'),
    "auto_shard": (lambda value: isinstance(value, bool), "True or False"),
    "stall_timeout": (lambda value: value is None or is_positive(value), "seconds, above 0, or None to wait for ever"),
}

_DEFAULTS: Mapping[str, Any] = {
    "strategy": "auto",
    "scale_batch": True,
    "scale_lr": "auto",
    "warmup_epochs": "auto",
    "auto_shard": True,
    "stall_timeout": STALL_TIMEOUT,
}

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
    chosen = dict(given)
    for name, default in _DEFAULTS.items():
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
        if name == "strategy" and value in ("auto", getattr(given[name], "word", None)):
            continue  # nothing is decided, or the same, with options of its own
        if isinstance(given[name], AllReduce) and given[name].word == "auto" and value in ENGINES:
            chosen[name] = dataclasses.replace(given[name], engine=value)
            continue
        if given[name] not in (default, value):
            raise ScopeError(
                f"The launch contradicts the code. Received: {variable}={text!r} and "
                f"kdist.scope({name}={given[name]!r}). Expected at most one of them, or the same in both. "
                f"Fix: unset {variable}, or leave {name} out of the code."
            )
        chosen[name] = value
    return chosen


def changed(chosen: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Returns those of some arguments, by name, that are not what they are by default."""
    return [name for name in names if chosen[name] != _DEFAULTS[name]]


def misspelt(env: Mapping[str, str]) -> dict[str, str]:
    """Returns variables of the launch that mean nothing, each with the one that was probably meant.

    Args:
        env: mapping, the environment.
    """
    known = [f"KDIST_{name.upper()}" for name in _DEFAULTS]
    unknown = [name for name in env if name.startswith("KDIST_") and name not in known]
    meant = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.7) for name in unknown}
    return {name: close[0] for name, close in meant.items() if close}


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
    if isinstance(strategy, str) and strategy == env.get("KDIST_STRATEGY") and strategy not in WORDS:
        raise StrategyError(
            f"The launch asks for an unknown strategy. Received: KDIST_STRATEGY={strategy!r}. Expected one of "
            f"{', '.join(map(repr, WORDS))}. Fix: set one of these, or unset it."
        )
    if not isinstance(strategy, (str, AllReduce, ParameterServer, TPU)) and not hasattr(strategy, "extended"):
        raise StrategyError(
            f"`strategy` is of no known kind. Received: strategy={strategy!r} of type {type(strategy).__name__}. "
            f"Expected one of {', '.join(map(repr, WORDS))}, a kdist.AllReduce, a kdist.ParameterServer, a kdist.TPU "
            "or a tf.distribute.Strategy. Fix: choose one of these."
        )
    if isinstance(strategy, (AllReduce, ParameterServer, TPU)) and (problem := strategy.problem()):
        raise StrategyError(
            f"Impossible options. Received: {problem}. Fix: change it in kdist.{type(strategy).__name__}(...)."
        )
    for name, (is_fit, expected) in _FIT.items():
        if not is_fit(chosen[name]):
            variable = f"KDIST_{name.upper()}"
            received = f"{variable}={env[variable]!r}" if variable in env else f"{name}={chosen[name]!r}"
            raise StrategyError(
                f"`{name}` is not understood. Received: {received}. Expected {expected}. Fix: give one of these."
            )
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
