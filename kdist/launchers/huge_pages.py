"""Huge pages for the memory of long trainings, and not for what a process allocates while it starts."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping

_DISABLE, _IS_DISABLED = 41, 42  # PR_SET_THP_DISABLE and PR_GET_THP_DISABLE of Linux


def allow_later(env: Mapping[str, str], seconds: float) -> None:
    """Lets this process have huge pages after some seconds only, if it asks for them.

    While TensorFlow is imported and the first step is traced, many threads allocate for the first time, and a huge page
    takes the kernel longer to clear than what is used of it. Each later step allocates its tensors again.

    Args:
        env: mapping of variable name to value, the environment.
        seconds: float, how long.
    """
    if "glibc.malloc.hugetlb=1" not in env.get("GLIBC_TUNABLES", ""):
        return
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None or prctl(_IS_DISABLED, 0, 0, 0, 0) != 0 or prctl(_DISABLE, 1, 0, 0, 0) != 0:  # or not by kdist
        return
    timer = threading.Timer(seconds, prctl, (_DISABLE, 0, 0, 0, 0))
    timer.daemon = True
    timer.start()
