"""This process among the others: who it is, and the engine that it talks through, opened when first needed."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kdist.cluster import detect
from kdist.cluster.info import ClusterInfo
from kdist.engines.engine import Engine
from kdist.errors import ClusterError, ScopeError
from kdist.strategies.choice import ENGINES, MPI_LAUNCHERS, PARAMETER_SERVER, Choice, choose
from kdist.strategies.options import START_TIMEOUT
from kdist.watch.link import Watch
from kdist.watch.start import limited

if TYPE_CHECKING:
    from kdist.engines.mpi import MPIEngine

_log = logging.getLogger("kdist")

_ANY_TIME = 30 * 86400.0  # seconds


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
    """Returns when every rank has called it, however long that takes; a warning says who waits.

    Collective: every rank must call this, in the same order.
    """
    # Outside of a scope ranks may do very different things before, as in a sweep.
    open_engine(cluster_info(), start_timeout=_ANY_TIME).barrier()


@contextlib.contextmanager
def chief_first(per_host: bool = True) -> Iterator[None]:
    """Lets the chief through first, and the other ranks when it is done.

    For what must not be done by several processes at once and leaves a file behind: downloads, preprocessing. All ranks
    run what is inside, the others when the file is there.

    Collective: every rank must call this, in the same order.

    An engine is opened for it, the one that a scope without arguments would take (`KDIST_STRATEGY` chooses another),
    and waits for all ranks as long as that scope would.

    Args:
        per_host: bool, whether one rank of each other host comes next, before the rest: for hosts that share no disk.
            If `False`, all the others come at once.

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
    engine = open_engine(info)  # by all, before the chief makes anything or lets the others wait
    # The chief alone, even of hosts: they may share a disk.
    last = 2 if per_host else 1
    turn = 0 if info.rank == 0 else 1 if info.local_rank == 0 else last
    for _ in range(turn):
        engine.barrier()
    try:
        yield
    except BaseException as error:
        if last > turn:  # said now: the others come first, who may take long
            _log.error("kdist.chief_first: rank %d raises %s: %s", info.rank, type(error).__name__, error)
        raise
    finally:
        for _ in range(last - turn):
            engine.barrier()


def choice_for(word: str, info: ClusterInfo, *, is_synchronous: bool = False) -> Choice:
    """Chooses what this process gets, having looked at its GPUs and its Horovod if these matter.

    Args:
        word: str, one of `kdist.strategies.choice.WORDS`.
        info: `ClusterInfo`, who this process is.
        is_synchronous: bool, whether the user has asked for an all-reduce, by whatever engine.

    Returns:
        The choice.

    Raises:
        StrategyError: if the word is unknown, or this version does not serve the job.
    """
    if word != "auto" or not (info.launcher in MPI_LAUNCHERS or (info.size == 1 and info.launcher == "none")):
        return choose(word, info, is_synchronous=is_synchronous)
    import tensorflow as tf

    num_gpus = len(tf.config.get_visible_devices("GPU"))
    return choose(word, info, num_gpus=num_gpus, horovod_on_gpus=num_gpus > 0 and _has_horovod_with_nccl())


def _has_horovod_with_nccl() -> bool:
    if importlib.util.find_spec("horovod") is None:
        return False
    from kdist.engines.horovod import built_with_nccl

    return built_with_nccl()


@dataclasses.dataclass
class _Opened:
    """The engine of this process. There can be one only: an MPI world or a Horovod cannot be left and joined again."""

    engine: Engine | None = None
    watch: Watch | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


_opened = _Opened()


def open_engine(info: ClusterInfo, name: str = "auto", start_timeout: float = START_TIMEOUT) -> Engine:
    """Returns this process's engine, opened by the first call.

    Args:
        info: `ClusterInfo`, what the launcher says.
        name: `"auto"` or an engine's name.
        start_timeout: float, seconds in which all ranks must appear.

    Returns:
        The engine, of the size that the launcher says.

    Raises:
        ClusterError: if the engine finds another number of processes than the launcher started.
        ScopeError: if another engine is open.
    """
    with _opened.lock:
        if _opened.engine is None:
            _opened.engine = _make_engine(info, name, start_timeout)
        engine = _opened.engine
    if engine.size > 1 and name not in ("auto", engine.name):
        raise ScopeError(
            f"This process already talks through {engine.name!r}. Received: {name!r} later in the same process. "
            "Expected one engine a process. Fix: start another process for another engine."
        )
    return engine


def set_stall_timeout(seconds: float | None, *, is_strict: bool) -> None:
    """Sets how long a rank may keep the others waiting.

    Args:
        seconds: float, or `None` for ever.
        is_strict: bool, whether that holds for ranks that compute or are in the user's own code, too.
    """
    if _opened.watch is not None:
        _opened.watch.stall_timeout, _opened.watch.is_strict = seconds, is_strict


def _make_engine(info: ClusterInfo, name: str, start_timeout: float) -> Engine:
    if name == "auto":
        # Asked before any scope, or without one: by what the launch wants of its scopes.
        wanted = os.environ.get("KDIST_STRATEGY", "auto")
        name = "single" if info.size == 1 else choice_for(wanted if wanted in ENGINES else "auto", info).strategy
    if name == PARAMETER_SERVER:
        raise ScopeError(
            "With parameter servers there are no collectives. Received: kdist.barrier() or kdist.chief_first() in a "
            f"job of {info.launcher} ({info.reason}). Expected tasks that do not wait for each other. Fix: leave it "
            "out; what is inside the scope and after it runs on the chief alone."
        )
    engine = _MAKERS[name](info, start_timeout)
    if engine.size != info.size:
        raise ClusterError(
            f"The launcher and the engine {name!r} disagree about the size of the job. Received: {info.size} "
            f"process(es) from {info.launcher} ({info.reason}), but {name} sees {engine.size}. Expected the same "
            "number. Fix: use the launcher of the MPI that mpi4py or Horovod was built with; `kdist env` shows them. "
            "With `kdist run` they are the same."
        )
    if engine.size > 1:
        from kdist.launch import failure

        hook = failure.install(engine.abort, engine.rank, engine.size, engine.explain)
        _opened.watch = _watched(engine, hook.stop)
    return engine


def _watched(engine: Engine, stop: Callable[[str], Any]) -> Watch | None:
    """Begins to watch over the ranks; without a connection between their hosts the job goes on unwatched."""
    watch = Watch(engine.activity, engine.rank, engine.size, end=stop, warn=_log.warning)
    address = watch.listen(everywhere=engine.local_size < engine.size) if engine.rank == 0 else None
    address = engine.broadcast_object(address)
    missing = ""
    if engine.rank:
        try:
            watch.connect(address)
        except OSError as error:
            missing = str(error)
    if any(everyone := engine.gather_objects(missing)):
        if engine.rank == 0:
            rank = next(rank for rank, why in enumerate(everyone) if why)
            _log.warning("nobody watches for ranks that hang: rank %d cannot reach rank 0: %s", rank, everyone[rank])
        return None
    watch.start()
    atexit.register(watch.finish)  # after the engine's own, so that it comes before
    return watch


def _within(info: ClusterInfo, seconds: float) -> contextlib.AbstractContextManager[None]:
    """Ends the job if not all ranks have begun after some seconds; the launcher alone can end it by then."""
    from kdist.launch.failure import FailureHook
    from kdist.launch.worker import end_job

    return limited(seconds, info.rank, info.size, FailureHook(end_job, info.rank, info.size).stop)


def _single(info: ClusterInfo, start_timeout: float) -> Engine:
    from kdist.engines.single import SingleEngine

    return SingleEngine()


def _mpi(info: ClusterInfo, start_timeout: float) -> Engine:
    with _within(info, start_timeout):
        return _mpi_with_devices()


def _mpi_with_devices() -> MPIEngine:
    """Opens MPI and takes this process's devices: by its first message TensorFlow would take all."""
    from kdist.engines.mpi import MPIEngine
    from kdist.strategies.devices import cpus_of_process, take_devices

    engine = MPIEngine()
    everyone = engine.exchange(cpus_of_process())
    num_sharing = min(everyone.count(everyone[engine.rank]), engine.local_size)  # two hosts may have one name
    take_devices(engine.local_rank, engine.local_size, os.environ, num_sharing)
    return engine


def _horovod(info: ClusterInfo, start_timeout: float) -> Engine:
    from kdist.engines.horovod import HorovodEngine
    from kdist.strategies.devices import take_devices

    take_devices(info.local_rank, info.local_size, os.environ)  # its first message starts TensorFlow
    with _within(info, start_timeout):
        return HorovodEngine("mpi" if info.launcher in MPI_LAUNCHERS else None)


def _collective(info: ClusterInfo, start_timeout: float) -> Engine:
    from kdist.engines.collective import CollectiveEngine
    from kdist.engines.rendezvous import own_address
    from kdist.strategies.devices import take_devices

    if info.launcher == "tf_config":
        take_devices(info.local_rank, info.local_size, os.environ)  # its server takes the devices as they are then
        addresses = [*info.cluster_spec.get("chief", ()), *info.cluster_spec.get("worker", ())]
        return CollectiveEngine(addresses, info.rank, start_timeout=start_timeout)
    with _within(info, start_timeout):
        mpi = _mpi_with_devices()
    addresses = mpi.exchange(own_address())
    return CollectiveEngine(addresses, mpi.rank, start_timeout=start_timeout, abort=mpi.abort)


# Imported when made: each needs a library that the others do without.
_MAKERS: Mapping[str, Callable[[ClusterInfo, float], Engine]] = {
    "single": _single,
    "mpi": _mpi,
    "horovod": _horovod,
    "collective": _collective,
}
