"""Who this process is in its job, by its launcher: pure functions of an environment mapping."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from kdist.cluster.horovod import horovod
from kdist.cluster.info import ClusterInfo
from kdist.cluster.mpi import intel_mpi, mpich, mvapich, openmpi
from kdist.cluster.slurm import slurm
from kdist.cluster.tf_config import tf_config
from kdist.cluster.tpu import tpu
from kdist.errors import ClusterError

__all__ = ["ClusterInfo", "detect"]


Reader = Callable[[Mapping[str, str]], ClusterInfo | str]
"""Reads the variables of one launcher, of a mapping of variable name to value.

It returns the `ClusterInfo`, or a str: why this launcher did not start the process. It raises `ClusterError` if the
variables are malformed.
"""


@dataclasses.dataclass(frozen=True)
class _Row:
    launcher: str
    read: Reader


# The innermost launcher, which started this process, is first.
TABLE = (
    _Row("horovod", horovod),  # first: horovodrun sets HOROVOD_RANK for its own processes, inside of any other launcher
    _Row("openmpi", openmpi),  # before Slurm: mpirun inside an allocation starts its daemons by srun
    _Row("mvapich", mvapich),  # before MPICH: its Hydra sets MPICH's variables too
    _Row("intel_mpi", intel_mpi),  # before MPICH: the same variables, and some of its own
    _Row("mpich", mpich),  # before Slurm: Hydra inside an allocation starts its proxies by srun
    _Row("slurm", slurm),  # after MPI's launchers: a step may contain them
    _Row("tf_config", tf_config),  # after launchers: by hand or by a platform, it may describe a single task
    _Row("tpu", tpu),  # last: a TPU VM sets its variables for every process
)


def detect(env: Mapping[str, str]) -> ClusterInfo:
    """Detects rank and size of this process from a launcher's environment variables.

    The first matching row of an ordered table decides, except that a `TF_CONFIG` of several tasks precedes a launcher
    of one process. Rows that contradict each other are refused.

    Args:
        env: mapping of variable name to value, as `os.environ`; it is only read.

    Returns:
        A `ClusterInfo` with the reason for the decision, and why each other row was rejected.

    Raises:
        ClusterError: if variables are malformed, or contradict each other.

    Example:
    >>> detect({}).launcher
    'none'
    """
    found: dict[str, ClusterInfo] = {}
    rejected: list[tuple[str, str]] = []
    for row in TABLE:
        answer = row.read(env)
        if isinstance(answer, ClusterInfo):
            found[row.launcher] = answer
        else:
            rejected.append((row.launcher, answer))
    if not found:
        return ClusterInfo(rejected=tuple(rejected))
    chosen = _choose(found)
    others = [other for other in found.values() if other is not chosen]
    rejected += [(other.launcher, f"matched, but {chosen.launcher} has priority: {other.reason}") for other in others]
    ignored = [_REPORTED[other.launcher] for other in others if other.launcher in _REPORTED]
    reason = "; ".join([chosen.reason, *(f"{what} was ignored" for what in ignored)])
    return dataclasses.replace(chosen, reason=reason, rejected=tuple(rejected))


# Rows that the reason mentions if another row decides.
_REPORTED = {"tf_config": "the single task of TF_CONFIG", "tpu": "the TPU"}


def _choose(found: Mapping[str, ClusterInfo]) -> ClusterInfo:
    """Returns the row that decides; raises if rows contradict each other."""
    first, *rest = found.values()
    for other in rest:
        if other.launcher == "tf_config":
            tasks = sum(map(len, other.cluster_spec.values()))
            if tasks > 1 and first.size > 1 and not (first.launcher == "slurm" and first.size in (tasks, tasks + 1)):
                raise _contradiction(first, other)
            # A launcher of one process, or a Slurm step each of whose tasks has a TF_CONFIG.
            if tasks > 1:
                return other
        # Slurm's variables may be those of a launcher's daemons, and a TPU is not a launcher.
        elif other.launcher not in ("slurm", "tpu") and _disagree(first, other):
            raise _contradiction(first, other)
    return first


def _disagree(first: ClusterInfo, other: ClusterInfo) -> bool:
    return min(first.size, other.size) > 1 and (first.rank, first.size) != (other.rank, other.size)


def _contradiction(first: ClusterInfo, other: ClusterInfo) -> ClusterError:
    return ClusterError(
        f"Two launchers contradict each other. Received: {first.launcher}'s {first.reason} and {other.launcher}'s "
        f"{other.reason}. Expected the variables of one launcher. Fix: start the script with one of them, and unset "
        f"the variables of the other."
    )
