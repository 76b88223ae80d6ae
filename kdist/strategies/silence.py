"""A task that says nothing, while the chief waits for it inside of TensorFlow, where nothing can be raised."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from kdist.launch.failure import FailureHook
from kdist.strategies.attendance import Attendance

_TICK = 1.0  # seconds
_GRACE = 10.0  # seconds that the chief's main thread has to raise by itself


@contextlib.contextmanager
def silence_ends_the_job(attendance: Attendance, timeout: float, progress: Callable[[], int]) -> Iterator[None]:
    """Ends the job if a task says nothing and the main thread does not go on, both for longer than the time limit.

    To read a variable of a ps, or to make a function that workers run, has no time limit of TensorFlow's: a process
    that is stopped keeps its connections.

    Args:
        attendance: `Attendance`, which hears the tasks.
        timeout: float, seconds.
        progress: callable, a number that grows while the main thread goes on.
    """
    is_over = threading.Event()

    def watch() -> None:
        quiet: dict[str, float] = collections.defaultdict(float)
        idle = 0.0
        heard, at = attendance.heard(), progress()
        # Counted, not read off a clock: if this process was stopped itself, the others were not silent meanwhile.
        while not is_over.wait(_TICK):
            before, heard = heard, attendance.heard()
            for name in heard:
                quiet[name] = quiet[name] + _TICK if heard[name] == before.get(name) else 0.0
            idle, at = (idle + _TICK if progress() == at else 0.0), progress()
            silent = [name for name in heard if quiet[name] > timeout]
            if silent and idle > timeout + _GRACE:
                attendance.dismiss(well=False)
                FailureHook(os._exit, 0, len(heard) + 1).stop(
                    f"{', '.join(silent)} said nothing for {timeout:.0f} s, and TensorFlow waits. Expected every "
                    "worker and ps to answer. Fix: see whether it is stopped or overloaded; give it longer by "
                    "kdist.ParameterServer(timeout=...)."
                )

    threading.Thread(target=watch, name="kdist-silence", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
