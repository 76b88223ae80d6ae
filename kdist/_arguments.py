"""The arguments of `kdist.scope`, from the code and from the environment, and their checks."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from kdist.errors import ScopeError, StrategyError
from kdist.reports.log import problem_of_level
from kdist.scaling import is_learning_rate_scale, is_warmup
from kdist.strategies.options import TPU, AllReduce, ParameterServer, is_positive
from kdist.strategies.selection import ENGINES, WORDS, check_word

AUTO_STALL_TIMEOUT = 600.0
"""What `stall_timeout="auto"` is, in seconds, for a rank that is neither busy nor in the user's code."""

# The check of each argument, and what it expects.
_VALID: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "scale_batch": (lambda value: isinstance(value, bool), "True or False"),
    "scale_lr": (is_learning_rate_scale, '"auto", "linear", "sqrt", a positive number or None'),
    "warmup_epochs": (is_warmup, '"auto" or a number that is not negative'),
    "auto_shard": (lambda value: isinstance(value, bool), "True or False"),
    "stall_timeout": (
        lambda value: value is None or (isinstance(value, str) and value == "auto") or is_positive(value),
        '"auto", seconds, above 0, or None for no limit',
    ),
    "micro_batches": (
        lambda value: value is None or (isinstance(value, numbers.Integral) and value is not True and int(value) > 0),
        "an integer above 0, or None for the number of ranks",
    ),
}

_DEFAULTS: Mapping[str, Any] = {
    "strategy": "auto",
    "scale_batch": True,
    "scale_lr": "auto",
    "warmup_epochs": "auto",
    "auto_shard": True,
    "stall_timeout": "auto",
    "micro_batches": None,
}

# Texts of environment variables for arguments that are booleans.
_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}


def _number_or_word(text: str) -> str | float | None:
    if text.lower() == "none":
        return None
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def with_environment(given: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments, with those that have their default replaced by `KDIST_*` variables.

    Args:
        given: mapping of the names of the scope's arguments to their values.
        env: mapping, the environment.

    Raises:
        ScopeError: if the environment contradicts the code.
        StrategyError: if a variable is invalid.
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
                    f"{variable} is invalid. Received: {variable}={text!r}. Expected 0, 1, true or false. "
                    "Fix: set one of these, or unset it."
                )
            value = _BOOLEANS[text.lower()]
        elif name != "strategy":
            value = _number_or_word(text)
        if name == "strategy" and value in ("auto", getattr(given[name], "word", None)):
            continue  # the variable decides nothing, or names the same strategy, which has options here
        if isinstance(given[name], AllReduce) and given[name].word == "auto" and value in ENGINES:
            chosen[name] = dataclasses.replace(given[name], engine=value)
            continue
        if given[name] not in (default, value):
            raise ScopeError(
                f"The environment contradicts the code. Received: {variable}={text!r} and "
                f"kdist.scope({name}={given[name]!r}). Expected at most one of them, or the same in both. "
                f"Fix: unset {variable}, or remove {name} from the code."
            )
        chosen[name] = value
    return chosen


def changed(chosen: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Returns those of some arguments, by name, that differ from their default."""
    return [name for name in names if chosen[name] != _DEFAULTS[name]]


def misspelled(env: Mapping[str, str]) -> dict[str, str]:
    """Returns unknown `KDIST_*` variables, each with the known one that it resembles.

    Args:
        env: mapping, the environment.
    """
    known = ["KDIST_LOG", "KDIST_TRACEBACK", *(f"KDIST_{name.upper()}" for name in _DEFAULTS)]
    unknown = [name for name in env if name.startswith("KDIST_") and name not in known]
    similar = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.7) for name in unknown}
    return {name: close[0] for name, close in similar.items() if close}


def check_environment(env: Mapping[str, str]) -> None:
    """Raises for `KDIST_*` variables that no scope accepts, and an unknown `KDIST_LOG`, without loading Keras.

    Args:
        env: mapping, the environment.

    Raises:
        StrategyError: if one is invalid.
    """
    if problem := problem_of_level(env):
        raise StrategyError(problem)
    check_values(with_environment(_DEFAULTS, env), env)


def check(chosen: Mapping[str, Any], env: Mapping[str, str]) -> None:
    """Raises for arguments that are invalid in every scope.

    Args:
        chosen: mapping of the names of the scope's arguments to their values.
        env: mapping, the environment, for the message.

    Raises:
        ScopeError: if Keras does not run on TensorFlow.
        StrategyError: if the strategy or a setting is unknown.
    """
    check_values(chosen, env)
    _check_backend(env)


def check_values(chosen: Mapping[str, Any], env: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raises for values of arguments that no scope accepts.

    Args:
        chosen: mapping of the names of the scope's arguments to their values.
        env: mapping, the environment from which they are, for the message.

    Raises:
        StrategyError: if one is invalid.
    """
    strategy = chosen["strategy"]
    if isinstance(strategy, str) and strategy == env.get("KDIST_STRATEGY") and strategy not in WORDS:
        raise StrategyError(
            f"KDIST_STRATEGY is unknown. Received: KDIST_STRATEGY={strategy!r}. Expected one of "
            f"{', '.join(map(repr, WORDS))}. Fix: set one of these, or unset it."
        )
    if isinstance(strategy, str):
        check_word(strategy)
    elif not isinstance(strategy, (AllReduce, ParameterServer, TPU)) and not hasattr(strategy, "extended"):
        raise StrategyError(
            f"`strategy` has an unsupported type. Received: strategy={strategy!r} of type {type(strategy).__name__}. "
            f"Expected one of {', '.join(map(repr, WORDS))}, a kdist.AllReduce, a kdist.ParameterServer, a kdist.TPU "
            "or a tf.distribute.Strategy. Fix: choose one of these."
        )
    for name, (is_valid, expected) in _VALID.items():
        if not is_valid(chosen[name]):
            variable = f"KDIST_{name.upper()}"
            received = f"{variable}={env[variable]!r}" if variable in env else f"{name}={chosen[name]!r}"
            raise StrategyError(
                f"`{name}` is invalid. Received: {received}. Expected {expected}. Fix: use one of these."
            )
    _check_micro_batches(chosen)


def _check_micro_batches(chosen: Mapping[str, Any]) -> None:
    if (number := chosen["micro_batches"]) is None:
        return
    options = chosen["strategy"]
    others = {"scale_batch=False": not chosen["scale_batch"], "auto_shard=False": not chosen["auto_shard"]}
    if isinstance(options, AllReduce):
        others[f"sync_every={options.sync_every}"] = options.sync_every > 1
    for other, is_given in others.items():
        if is_given:
            raise StrategyError(
                f"micro_batches contradicts another argument. Received: micro_batches={number} and {other}. Expected "
                f"one of them: with micro_batches a step takes {number} whole batch(es) of one input, and one update. "
                f"Fix: omit micro_batches or {other}."
            )


def _check_backend(env: Mapping[str, str]) -> None:
    import keras

    backend = keras.config.backend()
    if backend != "tensorflow":
        raise ScopeError(
            f"kdist needs Keras' TensorFlow backend. Received: the backend {backend!r} "
            f"(KERAS_BACKEND={env.get('KERAS_BACKEND', 'unset')}). Expected 'tensorflow'. "
            "Fix: KERAS_BACKEND=tensorflow, or keras.distribution for JAX."
        )
