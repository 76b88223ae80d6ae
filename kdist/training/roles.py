"""A scope with parameter servers: the chief trains, workers and ps serve and leave the script."""

from __future__ import annotations

import atexit
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras

from kdist.cluster.info import ClusterInfo
from kdist.engines.engine import Engine
from kdist.errors import ClusterError, ScopeError, StrategyError
from kdist.launch import failure
from kdist.launch.ports import free_ports
from kdist.strategies.attendance import Attendance
from kdist.strategies.devices import leave_gpus
from kdist.strategies.dispatch import Dispatcher
from kdist.strategies.options import ParameterServer
from kdist.strategies.parameter_server import ParameterServerStrategy
from kdist.strategies.server import serve
from kdist.training import _keras_internals as internals
from kdist.training.evaluator import Evaluator
from kdist.training.scheduled_model import schedule

logger = logging.getLogger("kdist")

Cluster = Mapping[str, Sequence[str]]


class Leader:
    """The chief's side of a cluster with parameter servers. One for all scopes of the process.

    Args:
        cluster: mapping of job name to addresses.
        options: `ParameterServer`.
    """

    def __init__(self, cluster: Cluster, options: ParameterServer) -> None:
        self.attendance = Attendance(cluster, options.timeout)
        # Registered before anything can fail: those who wait must be told.
        atexit.register(lambda: self.attendance.dismiss(well=not hasattr(sys, "last_value")))
        self.attendance.wait_for_all()
        host = cluster["chief"][0].rpartition(":")[0]
        self.strategy = ParameterServerStrategy(
            {"worker": cluster["worker"], "ps": cluster["ps"], "chief": [f"{host}:{free_ports(1)[0]}"]}
        )
        self.dispatcher = Dispatcher(self.strategy, self.attendance, options.timeout)
        logger.info("%d worker(s) and %d ps train asynchronously", len(cluster["worker"]), len(cluster["ps"]))

    @contextlib.contextmanager
    def scope(self, options: ParameterServer) -> Iterator[ParameterServerStrategy]:
        """Makes models that are made in it be trained by the workers.

        Args:
            options: `ParameterServer`, for these models.
        """

        def made(model: keras.Model) -> None:
            schedule(model, self.strategy, self.dispatcher, options)

        def used(model: keras.Model, verb: str) -> None:
            raise ScopeError(
                f"A model made outside of kdist.scope() is used in it. Received: {type(model).__name__}.{verb}. "
                "Expected the model to be made inside: its variables are to be on the ps. Fix: move the line that "
                "makes it into the scope."
            )

        with self.strategy.scope(), internals.watch_models(made, used):
            try:
                yield self.strategy
            except SystemExit as error:
                if failure.exit_code(error):
                    self.attendance.dismiss(well=False)
                raise


def roles(info: ClusterInfo, options: ParameterServer, open_mpi: Callable[[], Engine]) -> tuple[Cluster, str, int]:
    """Returns the cluster of the tasks that train, and which task this process is; the chief leaves the GPUs.

    Args:
        info: `ClusterInfo`, what the launcher says.
        options: `ParameterServer`.
        open_mpi: callable that opens MPI's engine, where the launcher gave ranks and no addresses.

    Raises:
        ClusterError: if the cluster lacks a task that training needs.
        ScopeError: if TensorFlow has already initialised the GPUs of the chief's host.
        StrategyError: if there are too few ranks, or another number of ps than the user has said.
    """
    is_by_tf_config = info.launcher == "tf_config"
    if info.task_type == "chief" if is_by_tf_config else info.rank == 0:
        leave_gpus()  # the chief computes nothing; the first message over MPI starts TensorFlow
    if is_by_tf_config:
        return _by_tf_config(info, options.num_ps)
    return _by_rank(open_mpi(), options.num_ps)


def take_role(
    cluster: Cluster, job: str, index: int, *, info: ClusterInfo, options: ParameterServer
) -> Leader | Evaluator:
    """Returns what opens the scopes of a chief or an evaluator; a worker or ps serves, and leaves the script.

    Args:
        cluster: mapping of job name to addresses, of the tasks that train.
        job: str, this task's job name.
        index: int, this task's index within its job.
        info: `ClusterInfo`, what the launcher says.
        options: `ParameterServer`.

    Raises:
        SystemExit: with code 0, when a worker's or ps's chief is done.
        ClusterError: if tasks do not appear, or a port is taken.
        ClusterLostError: if a worker's or ps's chief failed or is lost.
    """
    if job in ("worker", "ps"):
        serve(cluster, job, index, local_rank=info.local_rank, local_size=info.local_size, timeout=options.timeout)
    return Leader(cluster, options) if job == "chief" else Evaluator(cluster, index, options)


def _by_tf_config(info: ClusterInfo, num_ps: int) -> tuple[Cluster, str, int]:
    spec = info.cluster_spec
    cluster = {job: spec[job] for job in ("chief", "worker", "ps") if spec.get(job)}  # evaluators need not be listed
    missing = [job for job in ("chief", "worker", "ps") if job not in cluster]
    if missing:
        raise ClusterError(
            f"The cluster lacks tasks that training with parameter servers needs. Received: TF_CONFIG with "
            f"{', '.join(f'{len(v)} {k}' for k, v in spec.items())}. Expected one chief, at least one worker and at "
            f"least one ps. Fix: add {' and '.join(missing)} to TF_CONFIG's cluster, on every task."
        )
    if num_ps not in (ParameterServer.num_ps, len(cluster["ps"])):
        raise StrategyError(
            f"The cluster says how many parameter servers there are. Received: num_ps={num_ps}, and a cluster with "
            f"{len(cluster['ps'])} ps. Expected the same. Fix: leave num_ps out; `kdist run` takes `--ps {num_ps}`."
        )
    return cluster, str(info.task_type), int(info.task_index or 0)


def _by_rank(engine: Engine, num_ps: int) -> tuple[Cluster, str, int]:
    """Gives rank 0 to the chief, the last ranks to the ps, and those between to workers."""
    if engine.size < num_ps + 2:
        raise StrategyError(
            f"Too few ranks for parameter servers. Received: {engine.size} rank(s) and num_ps={num_ps}. Expected at "
            f"least {num_ps + 2}: one chief, one worker, {num_ps} ps. Fix: start more ranks."
        )
    found = engine.gather_objects((_own_address(), free_ports(engine.size)))
    hosts = [host for host, _ in found]
    is_one_host = len(set(hosts)) == 1
    places = []
    for rank, host in enumerate(hosts):
        # Of the ports that its host's first rank found: those of different ranks might be the same.
        port = found[hosts.index(host)][1][hosts[:rank].count(host)]
        places.append(f"{'127.0.0.1' if is_one_host else host}:{port}")
    first_ps = engine.size - num_ps
    cluster = {"chief": places[:1], "worker": places[1:first_ps], "ps": places[first_ps:]}
    for job, start in (("ps", first_ps), ("worker", 1), ("chief", 0)):
        if engine.rank >= start:
            return cluster, job, engine.rank - start
    raise AssertionError("a rank is at least 0")


def _own_address() -> str:
    """Returns this machine's address, as other machines reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing; asks for the route only
        return str(probe.getsockname()[0])
    return socket.gethostname()
