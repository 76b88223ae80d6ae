"""The line of the user's script that a call comes from."""

from __future__ import annotations

import os
import sys

_KDIST = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = (_KDIST + os.sep, os.path.dirname(os.__file__) + os.sep, "<frozen ")


def user_line() -> str:
    """Returns the innermost line of the stack outside of kdist and installed libraries, as `train.py:12`."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARIES) and "site-packages" not in name:
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"
