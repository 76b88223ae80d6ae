"""The one wait of a job that nobody can watch over: until all ranks have come, none knows of the others."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

_LOG = logging.getLogger("kdist")

_WAIT_IS_LONG = 60.0  # seconds after which a rank says that it waits


@contextlib.contextmanager
def limited(seconds: float, rank: int, size: int, end: Callable[[str], object]) -> Iterator[None]:
    """Ends the job if what is inside takes too long: a library's start, which returns when every rank has begun it.

    Such a start must let Python's other threads run. A launcher ends a job whose rank has failed; but it takes one
    that ended with code 0 before, or that is stopped, for a rank that may still come.

    Args:
        seconds: float, how long all ranks may take to appear.
        rank: int, this process's number.
        size: int, the number of ranks.
        end: function of a text, which says it and ends the job.
    """
    has_begun = threading.Event()
    head_start = min(_WAIT_IS_LONG, seconds / 2)

    def wait() -> None:
        if has_begun.wait(head_start):
            return
        _LOG.warning(
            "rank %d of %d waits for ranks that have not started yet: those that do not say this. %.0f s are left",
            *(rank, size, seconds - head_start),
        )
        if not has_begun.wait(seconds - head_start):
            end(
                f"not all ranks have started within {seconds:g} s. Received: rank {rank} of {size} waits for the "
                "others, and the launcher says nothing of them. Expected kdist.scope() on every rank. Fix: look for a "
                "rank that ended with code 0 before, that takes another branch of the script, or that is blocked; on "
                "several hosts, tell MPI which network joins them (Open MPI: OMPI_MCA_btl_tcp_if_include=10.0.0.0/8; "
                "UCX: UCX_NET_DEVICES); where ranks need longer before the scope, "
                "kdist.scope(kdist.AllReduce(start_timeout=...))."
            )

    threading.Thread(target=wait, name="kdist-start", daemon=True).start()
    try:
        yield
    finally:
        has_begun.set()
