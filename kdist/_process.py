"""This process in the cluster: its rank, and what it waits for."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from kdist._engine import open_engine
from kdist.cluster import detect
from kdist.cluster.info import ClusterInfo
from kdist.reports.scope_marks import own_scopes

_log = logging.getLogger("kdist")

_NO_TIMEOUT = 30 * 86400.0  # seconds


def cluster_info() -> ClusterInfo:
    """Returns rank, size and launcher of this process, and the variables they were read from.

    It only reads the launcher's environment variables: nothing is imported or started.

    Returns:
        A frozen `ClusterInfo`.

    Raises:
        ClusterError: if the variables are malformed or contradict each other.
    """
    # `kdist plan` runs the script in one process, within an allocation or beside a `TF_CONFIG`, too.
    return ClusterInfo() if own_scopes.is_planned else detect(os.environ)


def rank() -> int:
    """Returns this process's number, from 0 to `size() - 1`; 0 for an evaluator, which has no rank of the job.

    Raises:
        ClusterError: if the launcher's variables are malformed or contradict each other.
    """
    return cluster_info().rank


def size() -> int:
    """Returns the number of processes of the job; 1 for an evaluator, which is not counted.

    Raises:
        ClusterError: if the launcher's variables are malformed or contradict each other.
    """
    return cluster_info().size


def local_rank() -> int:
    """Returns this process's number among those of its host, from 0.

    Raises:
        ClusterError: if the launcher's variables are malformed or contradict each other.
    """
    return cluster_info().local_rank


def local_size() -> int:
    """Returns the number of processes on this host.

    Raises:
        ClusterError: if the launcher's variables are malformed or contradict each other.
    """
    return cluster_info().local_size


def is_chief() -> bool:
    """Returns whether this process is the chief, which logs and writes files: rank 0 of the job, and no evaluator.

    Raises:
        ClusterError: if the launcher's variables are malformed or contradict each other.
    """
    return cluster_info().is_chief


def barrier() -> None:
    """Blocks until every rank has called it; a rank that waits long logs a warning.

    It has no timeout of its own. If the last scope was given a `stall_timeout`, that holds here, too.

    Before the first scope it opens the engine of a scope without arguments; `KDIST_STRATEGY` chooses another one.

    Collective: every rank must call this, in the same order.

    Raises:
        ClusterError: if the launcher's variables contradict each other or the engine.
        ScopeError: if the job trains with parameter servers, whose tasks do not wait for each other.
    """
    # Outside of a scope ranks may take very different times, as in a sweep.
    engine = open_engine(cluster_info(), start_timeout=_NO_TIMEOUT)
    with engine.activity.running("kdist.barrier"):
        engine.barrier()


@contextlib.contextmanager
def chief_first(per_host: bool = True) -> Iterator[None]:
    """Runs the body on the chief first, then on the other ranks.

    For work that several processes must not do at once and that leaves a file: downloads, preprocessing. All ranks run
    the body, the others after the file exists.

    Collective: every rank must call this, in the same order.

    It opens the engine of a scope without arguments (`KDIST_STRATEGY` chooses another one), with the same
    `start_timeout`.

    Args:
        per_host: bool, whether one rank of each other host runs next, before the rest: for hosts without a shared
            disk. If `False`, all others run at once.

    Returns:
        A context manager, which yields nothing.

    Raises:
        ClusterError: if the launcher's variables contradict each other or the engine.
        ScopeError: if the job trains with parameter servers, whose tasks do not wait for each other.

    Example:
    ```python
    with kdist.chief_first():
        if not path.exists():
            prepare(path)
    ```
    """
    info = cluster_info()
    if info.size == 1:
        yield
        return
    engine = open_engine(info)  # on all ranks, before the chief does anything or the others wait
    # The chief has a turn of its own: hosts may share a disk.
    last = 2 if per_host else 1
    turn = 0 if info.rank == 0 else 1 if info.local_rank == 0 else last
    for _ in range(turn):
        engine.barrier()
    try:
        yield
    except BaseException as error:
        if last > turn:  # logged now: the others, which may take long, run before this rank can exit
            _log.error("kdist.chief_first: rank %d raised %s: %s", info.rank, type(error).__name__, error)
        raise
    finally:
        for _ in range(last - turn):
            engine.barrier()
