"""This process among the others: who it is, and the engine that it talks through, opened when first needed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator

from kdist.cluster import detect
from kdist.cluster.info import ClusterInfo
from kdist.engines.engine import Engine
from kdist.errors import ClusterError, ScopeError


def cluster_info() -> ClusterInfo:
    """Returns who this process is in the cluster, and why kdist thinks so.

    Nothing is imported or started for it: the launcher's environment variables are read.

    Returns:
        A frozen `ClusterInfo`.

    Raises:
        ClusterError: if the variables are malformed or contradict each other.
    """
    return detect(os.environ)


def rank() -> int:
    """Returns this process's number, from 0 to `size() - 1`."""
    return cluster_info().rank


def size() -> int:
    """Returns the number of processes of the job."""
    return cluster_info().size


def local_rank() -> int:
    """Returns this process's number among those of its host."""
    return cluster_info().local_rank


def local_size() -> int:
    """Returns the number of processes on this host."""
    return cluster_info().local_size


def is_chief() -> bool:
    """Returns whether this process is the chief: rank 0, which speaks and writes files."""
    return cluster_info().is_chief


def barrier() -> None:
    """Returns when every rank has called it.

    Collective: every rank must call this, in the same order.
    """
    open_engine(cluster_info()).barrier()


@contextlib.contextmanager
def chief_first(per_host: bool = True) -> Iterator[None]:
    """Lets the chief through first, and the other ranks when it is done.

    For what must not be done by several processes at once and leaves a file behind: downloads, preprocessing.

    Collective: every rank must call this, in the same order.

    Args:
        per_host: bool, whether one rank of each host goes first, for hosts that share no disk. If `False`, only
            rank 0 does.

    Example:
    ```python
    with kdist.chief_first():
        (x, y), _ = keras.datasets.mnist.load_data()
    ```
    """
    info = cluster_info()
    goes_first = info.local_rank == 0 if per_host else info.rank == 0
    if info.size == 1:
        yield
    elif goes_first:
        try:
            yield
        finally:
            barrier()
    else:
        barrier()
        yield


@dataclasses.dataclass
class _Opened:
    """The engine of this process. There can be one only: an MPI world or a Horovod cannot be left and joined again."""

    engine: Engine | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


_opened = _Opened()


def open_engine(info: ClusterInfo, name: str = "auto") -> Engine:
    """Returns this process's engine, opened by the first call.

    Args:
        info: `ClusterInfo`, what the launcher says.
        name: `"auto"` or an engine's name.

    Returns:
        The engine, of the size that the launcher says.

    Raises:
        ClusterError: if the engine finds another number of processes than the launcher started.
        ScopeError: if another engine is open.
    """
    with _opened.lock:
        if _opened.engine is None:
            _opened.engine = _make_engine(info, name)
        engine = _opened.engine
    if engine.size > 1 and name not in ("auto", engine.name):
        raise ScopeError(
            f"This process already talks through {engine.name!r}. Received: {name!r} later in the same process. "
            "Expected one engine a process. Fix: start another process for another engine."
        )
    return engine


def _make_engine(info: ClusterInfo, name: str) -> Engine:
    if info.size == 1 and name == "auto":
        from kdist.engines.single import SingleEngine

        return SingleEngine()
    from kdist.engines.mpi import MPIEngine

    engine = MPIEngine()
    if engine.size != info.size:
        raise ClusterError(
            f"The launcher and MPI disagree about the size of the job. Received: {info.size} process(es) from "
            f"{info.launcher} ({info.reason}), but mpi4py's MPI sees {engine.size}. Expected the same number. Fix: "
            "use the launcher of the MPI that mpi4py was built with; `kdist env` shows both. With `kdist run` they "
            "are the same."
        )
    if engine.size > 1:
        from kdist.launch import failure

        failure.install(engine.abort, engine.rank, engine.size)
    return engine
