"""Which strategy a job gets: pure decisions, without TensorFlow."""

from __future__ import annotations

import dataclasses

from kdist.cluster.info import ClusterInfo
from kdist.errors import StrategyError

WORDS = ("auto", "single", "mpi")
"""The strategies that one word names."""

PLANNED_WORDS = ("horovod", "collective", "mirrored", "parameter_server", "tpu")
"""Words that this version does not serve yet."""

MPI_LAUNCHERS = ("openmpi", "mpich", "intel_mpi", "mvapich", "slurm")
"""Launchers whose processes find each other over MPI."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a job gets, and why.

    Attributes:
        strategy: str, `"single"` (Keras' own code path) or `"mpi"` (synchronous all-reduce over MPI).
        why: str, one clause.
    """

    strategy: str
    why: str


def choose(word: str, info: ClusterInfo) -> Choice:
    """Chooses what a job gets.

    Args:
        word: str, one of `WORDS`.
        info: `ClusterInfo`, who this process is.

    Returns:
        The choice.

    Raises:
        StrategyError: if the word is unknown, or this version does not serve the job.

    Example:
    >>> choose("auto", ClusterInfo()).strategy
    'single'
    """
    if word not in WORDS:
        later = " It is planned, but not in this version." if word in PLANNED_WORDS else ""
        raise StrategyError(
            f"Unknown strategy.{later} Received: strategy={word!r}. Expected one of {', '.join(map(repr, WORDS))}, a "
            "kdist.AllReduce or a tf.distribute.Strategy. Fix: choose one of these."
        )
    if word == "single":
        return Choice("single", "asked for" if info.size == 1 else "asked for: each rank trains for itself")
    if info.launcher in MPI_LAUNCHERS and (info.size > 1 or word == "mpi"):
        return Choice("mpi", f"{info.launcher} started {info.size} processes: {info.reason}")
    if info.size == 1 and info.launcher != "tpu":
        return Choice("single", "there is one process")
    raise StrategyError(
        f"A job of this launcher is not served by this version. Received: {info.size} process(es) of {info.launcher} "
        f"({info.reason}). Expected one process, or ranks started by an MPI launcher or srun. Fix: start it by "
        '`kdist run -np N script.py`, or choose strategy="single" (KDIST_STRATEGY=single) to train each process for '
        "itself."
    )
