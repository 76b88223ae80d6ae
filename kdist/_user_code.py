"""Which files are the user's, and the line of the script that a call comes from."""

from __future__ import annotations

import os
import sys
from types import FrameType

_KDIST = os.path.dirname(__file__) + os.sep
_LIBRARIES = (_KDIST, os.path.dirname(os.__file__) + os.sep, "<")
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of the paths of installed packages, Debian's too."""

_GENERATED = "__autograph_generated_file"  # TensorFlow's translation of a function

UNKNOWN_LINE = "an unknown line"
"""What `user_line` returns without a frame of the user's."""


def is_kdists(file: str) -> bool:
    """Returns whether a file is of kdist.

    Args:
        file: str, as in a code object's `co_filename`.
    """
    return file.startswith(_KDIST)


def is_users(file: str) -> bool:
    """Returns whether a file is the user's: not of kdist, Python, or an installed package.

    Args:
        file: str, as in a code object's `co_filename`.
    """
    return not file.startswith(_LIBRARIES) and _GENERATED not in file and not any(each in file for each in INSTALLED)


def user_place() -> tuple[str, int] | None:
    """Returns file and line of the innermost frame of the user's that called this, or `None`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def user_line() -> str:
    """Returns the innermost line of the user's that called this, as `train.py:12`."""
    place = user_place()
    return UNKNOWN_LINE if place is None else f"{os.path.basename(place[0])}:{place[1]}"
