"""The failure detector: ends the job where the chief waits inside of TensorFlow for a task that does not respond."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from kdist.parameter_server.membership import Membership
from kdist.reports.failure import FailureHook

_INTERVAL = 1.0  # seconds
_GRACE = 10.0  # seconds that the chief's main thread has to raise by itself


@contextlib.contextmanager
def failure_detection(membership: Membership, timeout: float, progress: Callable[[], int]) -> Iterator[None]:
    """Ends the job if a task sends no heartbeat and the main thread makes no progress, both beyond the time limit.

    TensorFlow has no time limit for reading a variable of a ps, or for making a function that workers run: a process
    that is stopped keeps its connections.

    Args:
        membership: `Membership`, which counts heartbeats.
        timeout: float, seconds.
        progress: callable, a number that grows while the main thread makes progress.
    """
    is_over = threading.Event()

    def watch() -> None:
        silent_for: dict[str, float] = collections.defaultdict(float)
        idle_for = 0.0
        heartbeats, at = membership.heartbeats(), progress()
        # Counted, not read off a clock: while this process itself is stopped, the others may send heartbeats.
        while not is_over.wait(_INTERVAL):
            before, heartbeats = heartbeats, membership.heartbeats()
            for name, count in heartbeats.items():
                silent_for[name] = silent_for[name] + _INTERVAL if count == before.get(name) else 0.0
            idle_for, at = (idle_for + _INTERVAL if progress() == at else 0.0), progress()
            failed = [name for name in heartbeats if silent_for[name] > timeout]
            if failed and idle_for > timeout + _GRACE:
                membership.close(success=False)
                FailureHook(os._exit, 0, len(heartbeats) + 1).fail(
                    f"no heartbeat from {', '.join(failed)} for {timeout:.0f} s, and TensorFlow waits for an answer. "
                    "Expected every worker and ps to respond. Fix: check whether it is stopped or overloaded; or raise "
                    "the limit by kdist.ParameterServer(timeout=...)."
                )

    threading.Thread(target=watch, name="kdist-failure-detector", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
