"""`ClusterInfo`: rank, size and launcher of a process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterInfo:
    """Who this process is, and why kdist thinks so.

    Attributes:
        launcher: str, what started this process: `"none"`, `"openmpi"`, `"mpich"`, `"intel_mpi"`,
            `"mvapich"`, `"slurm"`, `"horovod"`, `"tf_config"` or `"tpu"`.
        rank: int, this process's number among all, from 0.
        size: int, the number of processes.
        local_rank: int, this process's number among those of its host, from 0.
        local_size: int, the number of processes on this host.
        task_type: str or `None`, the task's job name in `TF_CONFIG` (`"chief"`, `"worker"`, `"ps"`,
            `"evaluator"`).
        task_index: int or `None`, the task's index within its job.
        cluster_spec: mapping of job name to a tuple of `"host:port"` addresses; empty without `TF_CONFIG`.
        tpu_name: str or `None`, the TPU's name, address or `"local"`.
        reason: str, the variables that decided.
        rejected: tuple of `(launcher, reason)` pairs, why each other launcher was rejected.
    """

    launcher: str = "none"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    task_type: str | None = None
    task_index: int | None = None
    cluster_spec: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tpu_name: str | None = None
    reason: str = "no launcher's variables are set"
    rejected: tuple[tuple[str, str], ...] = ()

    @property
    def is_chief(self) -> bool:
        """Whether this process is rank 0, which logs and writes files; an evaluator has no rank of the job."""
        return self.rank == 0 and self.task_type != "evaluator"
