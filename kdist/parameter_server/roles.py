"""The roles of processes: which is the chief, a worker, a ps or an evaluator, and what each does in a scope."""

from __future__ import annotations

from collections.abc import Callable

from kdist.cluster import connections
from kdist.cluster.info import ClusterInfo
from kdist.engines.engine import Engine
from kdist.errors import ClusterError, StrategyError
from kdist.launchers.hosts.ports import free_ports
from kdist.parameter_server.chief import Chief
from kdist.parameter_server.connection import Cluster
from kdist.parameter_server.evaluator import Evaluator
from kdist.parameter_server.server import serve
from kdist.strategies.devices import hide_gpus
from kdist.strategies.options import ParameterServer


def find_role(info: ClusterInfo, options: ParameterServer, open_mpi: Callable[[], Engine]) -> tuple[Cluster, str, int]:
    """Returns the cluster of the tasks that train, and the job and index of this process; hides GPUs from the chief.

    Args:
        info: `ClusterInfo`, as the launcher set it.
        options: `ParameterServer`.
        open_mpi: callable that opens MPI's engine, where the launcher set ranks and no addresses.

    Raises:
        ClusterError: if the cluster lacks a task that training needs.
        ScopeError: if TensorFlow has already initialised the GPUs of the chief's host.
        StrategyError: if there are too few ranks.
    """
    is_by_tf_config = info.launcher == "tf_config"
    if info.task_type == "chief" if is_by_tf_config else info.rank == 0:
        hide_gpus()  # the chief computes nothing; the first message over MPI starts TensorFlow
    if is_by_tf_config:
        return _by_tf_config(info)
    return _by_rank(open_mpi(), options.num_ps)


def check_number_of_ps(cluster: Cluster, options: ParameterServer) -> None:
    """Raises `StrategyError` if a cluster has another number of ps than a scope asks for."""
    num_ps = options.num_ps
    if num_ps not in (ParameterServer.num_ps, len(cluster["ps"])):
        raise StrategyError(
            f"num_ps contradicts the cluster. Received: num_ps={num_ps}, and a cluster with {len(cluster['ps'])} "
            f"ps. Expected the same number. Fix: leave num_ps out; `kdist run` takes `--ps {num_ps}`."
        )


def take_role(
    cluster: Cluster, job: str, index: int, *, info: ClusterInfo, options: ParameterServer
) -> Chief | Evaluator:
    """Returns what opens the scopes of a chief or an evaluator; a worker or ps serves, and its script ends here.

    Args:
        cluster: mapping of job name to addresses, of the tasks that train.
        job: str, this task's job name.
        index: int, this task's index within its job.
        info: `ClusterInfo`, as the launcher set it.
        options: `ParameterServer`.

    Raises:
        SystemExit: on a worker or ps with code 0, when the chief has finished.
        ClusterError: if tasks do not join, or a port is in use.
        ClusterLostError: on a worker or ps if the chief failed or is lost.
    """
    if job in ("worker", "ps"):
        serve(cluster, job, index, info, options)
    return Chief(cluster, options) if job == "chief" else Evaluator(cluster, index, options)


def _by_tf_config(info: ClusterInfo) -> tuple[Cluster, str, int]:
    spec = info.cluster_spec
    cluster = {job: spec[job] for job in ("chief", "worker", "ps") if spec.get(job)}  # evaluators need not be listed
    missing = [job for job in ("chief", "worker", "ps") if job not in cluster]
    if missing:
        raise ClusterError(
            "The cluster lacks tasks that training with parameter servers needs. Received: TF_CONFIG with "
            f"{', '.join(f'{len(v)} {k}' for k, v in spec.items())}. Expected one chief, at least one worker and at "
            f"least one ps. Fix: add {' and '.join(missing)} to TF_CONFIG's cluster, on every task."
        )
    return cluster, str(info.task_type), int(info.task_index or 0)


def _by_rank(engine: Engine, num_ps: int) -> tuple[Cluster, str, int]:
    """Makes rank 0 the chief, the last ranks ps, and those in between workers."""
    if engine.size < num_ps + 2:
        raise StrategyError(
            f"Too few ranks for parameter servers. Received: {engine.size} rank(s) and num_ps={num_ps}. Expected at "
            f"least {num_ps + 2}: one chief, one worker, {num_ps} ps. Fix: start more ranks."
        )
    found = engine.gather_objects((connections.own_hosts()[0], free_ports(engine.size)))
    hosts = [host for host, _ in found]
    is_one_host = len(set(hosts)) == 1
    addresses = []
    for rank, host in enumerate(hosts):
        # Of the ports that the host's first rank found: two ranks may find the same.
        port = found[hosts.index(host)][1][hosts[:rank].count(host)]
        addresses.append(connections.address("127.0.0.1" if is_one_host else host, port))
    first_ps = engine.size - num_ps
    cluster = {"chief": addresses[:1], "worker": addresses[1:first_ps], "ps": addresses[first_ps:]}
    starts = (("ps", first_ps), ("worker", 1), ("chief", 0))
    job, start = next(each for each in starts if engine.rank >= each[1])
    return cluster, job, engine.rank - start
