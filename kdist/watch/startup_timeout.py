"""A time limit for the start of a job. Heartbeats need a connection, which exists only after all ranks have started."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from kdist.restarts.events import Kind, own_reports

_LOG = logging.getLogger("kdist")

_WARN_AFTER = 60.0  # seconds after which a rank logs that it waits


@contextlib.contextmanager
def startup_timeout(seconds: float, rank: int, size: int, fail: Callable[[str], object]) -> Iterator[None]:
    """Ends the job if the body takes too long: the initialisation of a library, which returns once all ranks call it.

    The body must release the GIL while it waits. A launcher ends a job whose rank has failed, but not one in which a
    rank exited with code 0 before, or is stopped.

    Args:
        seconds: float, the time in which all ranks must start.
        rank: int, this process's number.
        size: int, the number of ranks.
        fail: function of a message that reports it and ends the job.
    """
    has_started = threading.Event()
    warn_after = min(_WARN_AFTER, seconds / 2)

    def wait() -> None:
        if has_started.wait(warn_after):
            return
        _LOG.warning(
            "rank %d of %d waits for ranks that have not started: those that do not log this. If all log it, the "
            "network that they chose does not connect them. %.0f s are left",
            *(rank, size, seconds - warn_after),
        )
        if not has_started.wait(min(seconds - warn_after, threading.TIMEOUT_MAX)):
            own_reports.failed(Kind.STALL, f"not all ranks have started within {seconds:g} s", None)
            fail(
                f"not all ranks have started within {seconds:g} s. Received: rank {rank} of {size} waits for the "
                "others, and the launcher reports no failure. Expected kdist.scope() on every rank. Fix: look for a "
                "rank that exited with code 0 before, that takes another branch of the script, or that is blocked; on "
                "several hosts, choose the network that MPI uses (Open MPI: OMPI_MCA_btl_tcp_if_include=10.0.0.0/8; "
                "UCX: UCX_NET_DEVICES); where ranks need longer before the scope, "
                "kdist.scope(kdist.AllReduce(start_timeout=...))."
            )

    threading.Thread(target=wait, name="kdist-start", daemon=True).start()
    try:
        yield
    finally:
        has_started.set()
