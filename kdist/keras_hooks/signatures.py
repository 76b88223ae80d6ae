"""The arguments of a model's methods, for any signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

CLASS_WEIGHT = "class_weight"
"""An argument of `fit`: a mapping of classes to weights, each of which ranks compare by itself."""


def comparable(arguments: dict[str, Any]) -> dict[str, str]:
    """Returns the arguments that ranks compare, as text."""
    compared = {}
    for name, value in arguments.items():
        if name == CLASS_WEIGHT and isinstance(value, dict):
            for key, weight in value.items():
                number = weight.item() if isinstance(weight, np.generic) else weight
                compared[f"{CLASS_WEIGHT}[{key!r}]"] = repr(number)
        elif name not in ("verbose", "callbacks") and (
            isinstance(value, (bool, int, float, str, type(None)))
            or (isinstance(value, list) and name in (CLASS_WEIGHT, "validation_freq"))
        ):
            compared[name] = repr(value)
    return compared


def named_arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Returns a call's arguments by name, also for `fit(self, *args, **kwargs)`."""
    named = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    return named


def with_signature_of(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `wrapper` and has the signature of the bound `original`."""

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return wrapper(*args, **kwargs)

    signature = inspect.signature(original)
    first, *others = signature.parameters.values()
    takes_self = first.kind is not inspect.Parameter.VAR_POSITIONAL
    method.__signature__ = signature.replace(parameters=others) if takes_self else signature  # type: ignore[attr-defined]
    return method
