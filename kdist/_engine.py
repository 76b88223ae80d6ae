"""The engine of this process: how its strategy is selected, and how it is opened when first needed."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kdist.cluster.info import ClusterInfo
from kdist.cluster.own_rank import take_rank
from kdist.cluster.slurm import has_pmi
from kdist.engines.engine import Engine
from kdist.errors import ClusterError, EngineNotFoundError, KDistError, ScopeError
from kdist.restarts.healing import own_healing
from kdist.strategies.options import START_TIMEOUT
from kdist.strategies.selection import (
    ENGINES,
    MPI_LAUNCHERS,
    PARAMETER_SERVER,
    Resources,
    Selection,
    agreed,
    choose,
    differing,
)
from kdist.watch.failure_detector import StallTimeout
from kdist.watch.heartbeat import Heartbeat
from kdist.watch.startup_timeout import startup_timeout

if TYPE_CHECKING:
    from kdist.engines.mpi import MPIEngine

_log = logging.getLogger("kdist")

_AGREE_TIMEOUT = 60.0  # seconds in which the tasks of a Slurm step must come, which starts them together

# What to do where the launcher and the engine have different numbers of ranks.
_SIZE_FIX = (
    "use the launcher of the MPI that mpi4py or Horovod was built with; `kdist env` shows them, and `kdist run` uses "
    "the right one. Without MPI on several hosts: kdist run --rendezvous HOST:PORT"
)
_SIZE_FIXES = {
    "slurm": "`srun --mpi=pmix`, or what else of `srun --mpi=list` the MPI of mpi4py or Horovod speaks; without MPI: "
    "KDIST_STRATEGY=collective, which takes `srun` alone"
}


def select_strategy(word: str, info: ClusterInfo, *, is_synchronous: bool = False) -> Selection:
    """Selects the strategy of this process by its launcher, and by its GPUs and its Horovod if these matter.

    Args:
        word: str, one of `kdist.strategies.selection.WORDS`.
        info: `ClusterInfo`.
        is_synchronous: bool, whether the user asked for an all-reduce with any engine.

    Returns:
        The `Selection`.

    Raises:
        StrategyError: if the word is unknown, or the job is not supported.
    """
    if word != "auto" or not (info.launcher in MPI_LAUNCHERS or (info.size == 1 and info.launcher == "none")):
        return choose(word, info, is_synchronous=is_synchronous)
    import tensorflow as tf

    from kdist.strategies import devices

    num_gpus = len(tf.config.get_visible_devices("GPU"))
    # Ranks of several hosts must choose the same, and know of their own one only.
    shares = info.local_size == info.size and devices.shares_gpus(info.local_size, os.environ)
    may_take_another = num_gpus > 0 and not shares
    has_mpi = info.launcher != "slurm" or (has_pmi(os.environ) and _has_mpi(may_take_another))
    has_nccl = num_gpus > 0 and _has_horovod_with_nccl()
    resources = Resources(num_gpus=num_gpus, horovod_on_gpus=has_nccl, shares_gpus=shares, has_mpi=has_mpi)
    return choose(word, info, resources)


def select_together(word: str, info: ClusterInfo, *, is_synchronous: bool = False) -> Selection:
    """Selects the strategy as `select_strategy` does, the same on all ranks of a Slurm step over several nodes.

    What a node lacks, mpi4py or GPUs, would else let its ranks wait for ever for others that talk another way.

    Collective: every rank must call this, in the same order.
    """
    own = select_strategy(word, info, is_synchronous=is_synchronous)
    # Without PMI all nodes take the same; MPI needs no way over TCP, so one that is closed only costs time.
    if word != "auto" or info.launcher != "slurm" or info.size == info.local_size or not has_pmi(os.environ):
        return own
    if _opened.selection is None:
        _opened.selection = _agreed(own, info)
    return _opened.selection


def _agreed(own: Selection, info: ClusterInfo) -> Selection:
    from kdist.launchers.slurm_step import payloads_of_all
    from kdist.reports.log import show_log

    show_log(info)
    try:
        strategies = payloads_of_all(info, os.environ, _AGREE_TIMEOUT, own.strategy)
    except KDistError as error:
        if info.is_chief:
            _log.warning(
                "the nodes could not compare how their ranks talk: rank 0 takes %s. KDIST_STRATEGY=%s asks for it "
                "without a comparison. Received: %s", own.strategy, own.strategy, error,
            )  # fmt: skip
        return own
    together = agreed(own, strategies)
    if together is not own and info.is_chief:
        _log.warning(
            "the nodes differ in what they have, and all ranks take collective. Received: %s. Expected the same on "
            "each node. Fix: install on each what `srun kdist env` shows to be missing, an MPI or GPUs; or set "
            "KDIST_STRATEGY.", differing(strategies),
        )  # fmt: skip
    return together


def _has_mpi(may_take_another: bool) -> bool:
    is_installed = importlib.util.find_spec("mpi4py") is not None
    if may_take_another or not is_installed:  # on GPUs: what is loaded here, the script could not initialise by itself
        return is_installed
    from kdist.engines.mpi import load_mpi

    try:
        load_mpi()
    except EngineNotFoundError:
        return False
    return True


def _has_horovod_with_nccl() -> bool:
    if importlib.util.find_spec("horovod") is None:
        return False
    from kdist.engines.horovod import built_with_nccl

    return built_with_nccl()


@dataclasses.dataclass
class _Opened:
    """The engine of this process. There is one only: MPI and Horovod cannot be initialised twice."""

    engine: Engine | None = None
    selection: Selection | None = None  # of all ranks of a Slurm step
    heartbeat: Heartbeat | None = None
    for_parameter_server: bool = False  # whether the tasks of parameter servers met by it, and make no other collective
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


_opened = _Opened()


def open_engine(
    info: ClusterInfo, name: str = "auto", start_timeout: float = START_TIMEOUT, *, for_parameter_server: bool = False
) -> Engine:
    """Returns this process's engine, opened by the first call.

    Args:
        info: `ClusterInfo`.
        name: `"auto"` or an engine's name.
        start_timeout: float, seconds in which all ranks must start.
        for_parameter_server: bool, whether the tasks of parameter servers exchange their roles by it, and nothing else.

    Returns:
        The engine, which has as many ranks as the launcher started.

    Raises:
        ClusterError: if the engine has another number of ranks than the launcher started.
        ScopeError: if another engine is open, or the tasks of parameter servers do not wait for each other.
    """
    if _opened.for_parameter_server and not for_parameter_server:
        raise _no_collectives(info)
    with _opened.lock:
        if _opened.engine is None:
            _opened.engine = _make_engine(info, name, start_timeout)
        _opened.for_parameter_server = for_parameter_server
        engine = _opened.engine
    if engine.size > 1 and name not in ("auto", engine.name):
        raise ScopeError(
            f"This process already uses the engine {engine.name!r}. Received: {name!r} later in the same process. "
            "Expected one engine per process. Fix: start another process for another engine."
        )
    return engine


def _forget() -> None:
    """Forgets the engine: the next call opens another one, over the ranks that are left."""
    _opened.engine = _opened.selection = _opened.heartbeat = None


def set_stall_timeout(timeout: StallTimeout) -> None:
    """Sets how long a rank may keep the others waiting.

    Args:
        timeout: `StallTimeout`.
    """
    if _opened.heartbeat is not None:
        _opened.heartbeat.stall_timeout = timeout


def _no_collectives(info: ClusterInfo) -> ScopeError:
    return ScopeError(
        "Parameter-server training has no collectives. Received: kdist.barrier() or kdist.chief_first() in a job of "
        f"{info.launcher} ({info.reason}). Expected tasks that do not wait for each other. Fix: remove it; the code in "
        "the scope and after it runs on the chief only."
    )


def _make_engine(info: ClusterInfo, name: str, start_timeout: float) -> Engine:
    if name == "auto":
        # Before any scope, or without one, the environment chooses the engine.
        word = os.environ.get("KDIST_STRATEGY", "auto")
        word = word if word in (*ENGINES, PARAMETER_SERVER) else "auto"
        name = "single" if info.size == 1 else select_together(word, info).strategy
    if name == PARAMETER_SERVER:
        raise _no_collectives(info)
    take_rank(info, os.environ)
    own_healing.closing.append(_forget)
    engine = _MAKERS[name](info, start_timeout)
    if engine.size != info.size:
        raise ClusterError(
            f"The launcher and the engine {name!r} have different numbers of ranks. Received: {info.size} "
            f"process(es) from {info.launcher} ({info.reason}), but {engine.size} in {name}. Expected the same "
            f"number. Fix: {_SIZE_FIXES.get(info.launcher, _SIZE_FIX)}."
        )
    if engine.size > 1:
        from kdist.reports import failure

        hook = failure.install(engine.abort, engine.rank, engine.size, engine.explain)
        heartbeat = _opened.heartbeat = _start_heartbeat(engine, hook.fail)
        hook.may_report = None if heartbeat is None else heartbeat.may_report
    return engine


def _start_heartbeat(engine: Engine, fail: Callable[[str], Any]) -> Heartbeat | None:
    """Starts the heartbeat; without a connection between the hosts the job runs without failure detection."""
    heartbeat = Heartbeat(engine.activity, engine.rank, engine.size, fail=fail, warn=_log.warning)
    address = heartbeat.listen(everywhere=engine.local_size < engine.size) if engine.rank == 0 else None
    address = engine.broadcast_object(address)
    error_text = ""
    if engine.rank:
        try:
            heartbeat.connect(address)
        except OSError as error:
            error_text = str(error)
    if any(errors := engine.gather_objects(error_text)):
        if engine.rank == 0:
            rank = next(rank for rank, text in enumerate(errors) if text)
            _log.warning("ranks that hang are not detected: rank %d cannot connect to rank 0: %s", rank, errors[rank])
        return None
    if own_healing.is_on and own_healing.peers is not None:
        heartbeat.has_lost, own_healing.heartbeat = own_healing.has_lost, heartbeat
        own_healing.closing.append(functools.partial(atexit.unregister, heartbeat.finish))
    heartbeat.start()
    atexit.register(heartbeat.finish)  # registered after the engine's handler, so that it runs first
    return heartbeat


def _startup_timeout(info: ClusterInfo, seconds: float) -> contextlib.AbstractContextManager[None]:
    """Ends the job through its launcher if not all ranks have started in time: there is no engine yet."""
    from kdist.launchers.worker import end_job
    from kdist.reports.failure import FailureHook

    return startup_timeout(seconds, info.rank, info.size, FailureHook(end_job, info.rank, info.size).fail)


def _single(info: ClusterInfo, start_timeout: float) -> Engine:
    from kdist.engines.single import SingleEngine

    return SingleEngine()


def _mpi(info: ClusterInfo, start_timeout: float) -> Engine:
    with _startup_timeout(info, start_timeout):
        return _mpi_with_devices()


def _mpi_with_devices() -> MPIEngine:
    """Opens MPI and configures this process's devices before a message, with which TensorFlow takes them all."""
    from kdist.engines.mpi import MPIEngine
    from kdist.strategies.devices import configure_devices, cpus_of_process, equal_threads

    engine = MPIEngine()
    cpus = engine.exchange(cpus_of_process(engine.local_size))
    configure_devices(engine.local_rank, engine.local_size, os.environ, equal_threads(cpus))
    return engine


def _horovod(info: ClusterInfo, start_timeout: float) -> Engine:
    from kdist.engines.horovod import HorovodEngine
    from kdist.strategies.devices import configure_devices

    configure_devices(info.local_rank, info.local_size, os.environ)  # its first message starts TensorFlow
    with _startup_timeout(info, start_timeout):
        return HorovodEngine("mpi" if info.launcher in MPI_LAUNCHERS else None)


def _collective(info: ClusterInfo, start_timeout: float) -> Engine:
    from kdist.cluster.connections import address, is_known, own_hosts
    from kdist.engines.collective import CollectiveEngine
    from kdist.launchers import slurm_step
    from kdist.launchers.hosts.ports import held_port
    from kdist.strategies.devices import configure_devices, cpus_of_process, equal_threads

    if info.launcher not in ("tf_config", "slurm"):
        with _startup_timeout(info, start_timeout):
            mpi = _mpi_with_devices()
        hosts = mpi.exchange(socket.gethostname())
        knows_all = {"yes"} == set(mpi.exchange("yes" if all(map(is_known, set(hosts))) else "no"))
        host = hosts[mpi.rank] if knows_all else own_hosts()[0]  # compute nodes may have no names
        with held_port() as port:  # until all ranks have one: two of a host would find the same
            addresses = mpi.exchange(address(host, port))
        return CollectiveEngine(addresses, mpi.rank, start_timeout=start_timeout, abort=mpi.abort)
    num_threads = None
    if info.launcher == "slurm":
        addresses, cpus = slurm_step.exchange(info, os.environ, start_timeout, cpus_of_process(info.local_size))
        num_threads = equal_threads(cpus)
    else:
        addresses = [*info.cluster_spec.get("chief", ()), *info.cluster_spec.get("worker", ())]
    # Before the engine, whose server takes the visible devices.
    configure_devices(info.local_rank, info.local_size, os.environ, num_threads)
    return CollectiveEngine(addresses, info.rank, start_timeout=start_timeout)


# Each imports its engine when called, because each engine needs another library.
_MAKERS: Mapping[str, Callable[[ClusterInfo, float], Engine]] = {
    "single": _single,
    "mpi": _mpi,
    "horovod": _horovod,
    "collective": _collective,
}
