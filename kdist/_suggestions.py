"""Errors of arguments that do not exist: they name those that do, and the one that was meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


def with_suggestions(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns a function whose `TypeError` of an unknown argument names those that it has.

    Args:
        function: callable without `**kwargs`.
    """
    return _checked(function, function.__name__)


def constructor_with_suggestions(of: type[_T]) -> type[_T]:
    """Makes the `TypeError` of a class's unknown argument name those that it has.

    Args:
        of: class whose constructor has no `**kwargs`.
    """
    setattr(of, "__init__", _checked(of.__init__, of.__name__))  # noqa: B010
    return of


def _checked(function: Callable[_P, _R], name: str) -> Callable[_P, _R]:
    known = [each for each in inspect.signature(function).parameters if each != "self"]

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for given in kwargs:
            if given not in known:
                raise TypeError(_message(name, given, known))
        return function(*args, **kwargs)

    return call


def _message(name: str, given: str, known: Iterable[str]) -> str:
    meant = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    fix = f"did you mean {meant[0]}?" if meant else "use one of these."
    return (
        f"{name}() has no argument {given!r}. Received: {name}({given}=...). Expected one of {', '.join(known)}. "
        f"Fix: {fix}"
    )
