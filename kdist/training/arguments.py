"""The arguments of a call of one of a model's verbs: read, compared and changed whatever the method's own signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from kdist.errors import ScopeError


def comparable(arguments: dict[str, Any]) -> dict[str, str]:
    """Returns the arguments whose values can be compared by what they print."""
    plain = (bool, int, float, str, type(None))
    return {
        name: repr(value)
        for name, value in arguments.items()
        if name not in ("verbose", "callbacks")
        and (
            isinstance(value, plain)
            or (isinstance(value, (list, dict)) and name in ("class_weight", "validation_freq"))
        )
    }


def named_arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Returns the dictionary in which a call's keyword arguments can be read and changed.

    A user's own `fit(self, *args, **kwargs)` keeps them in its `kwargs`.

    Raises:
        ScopeError: if the method takes no callbacks, by which the ranks agree.
    """
    parameters = bound.signature.parameters
    if "callbacks" in parameters:
        return bound.arguments
    for name, parameter in parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return bound.arguments.setdefault(name, {})
    raise ScopeError(
        f"A model's own method takes no callbacks, by which the ranks agree. Received: a method with the arguments "
        f"{', '.join(parameters) or 'none'}. Expected Keras' own arguments, `callbacks` among them. Fix: let it take "
        "`**kwargs` and pass them on to `super()`."
    )


def like(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `wrapper` and looks, to `help` and `inspect`, like the bound method `original`."""

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return wrapper(*args, **kwargs)

    # `inspect.signature` would show the unbound method's `self`.
    method.__signature__ = inspect.signature(original.__get__(object()))  # type: ignore[attr-defined]
    return method
