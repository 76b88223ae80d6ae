"""The traceback of an uncaught error as text: the frames of the user and of Keras, without those of kdist."""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from collections.abc import Mapping
from types import TracebackType

from kdist._user_code import INSTALLED, is_kdists
from kdist.reports.log import TRACEBACK_VARIABLE

_OF_KERAS = tuple(os.path.join(place, name, "") for place in INSTALLED for name in ("keras", "tensorflow"))


def traceback_text(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, env: Mapping[str, str]
) -> str:
    """Returns a traceback as Python prints it. `KDIST_TRACEBACK=full` leaves the frames of kdist in.

    Args:
        kind: the class of the error.
        error: the error.
        trace: its traceback.
        env: mapping, the environment.
    """
    told = traceback.TracebackException(kind, error, trace)
    if env.get(TRACEBACK_VARIABLE, "").lower() != "full":
        with contextlib.suppress(Exception):  # frames of kdist are better than no traceback
            _shorten(told, set())
    return "".join(told.format())


def _shorten(told: traceback.TracebackException, seen: set[int]) -> None:
    if id(told) in seen:
        return
    seen.add(id(told))
    inner = [*told.stack, None][1:]  # an error that was not raised, or a syntax error, has no frames
    kept = [frame for frame, called in zip(told.stack, inner, strict=True) if not _is_plumbing(frame, called)]
    if kept:  # an error of kdist's own threads has no other frames
        told.stack[:] = kept
    # The members of a group from Python 3.11 on.
    for each in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if each is not None:
            _shorten(each, seen)


def _is_plumbing(frame: traceback.FrameSummary, called: traceback.FrameSummary | None) -> bool:
    """Returns whether a frame is of kdist, of its contexts, or, as Keras filters them, of Keras on the way."""
    file = frame.filename
    if file == "<string>" and frame.name == "__init__":  # of a dataclass
        return called is not None and is_kdists(called.filename)
    return (
        is_kdists(file)
        or file in (contextlib.__file__, importlib.__file__)
        or file.startswith("<frozen importlib")
        or (called is not None and any(each in file for each in _OF_KERAS))
    )
