"""Slurm's `srun`: a step is a launch, a batch script is not."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kdist.cluster.info import ClusterInfo
from kdist.cluster.variables import integer, quote
from kdist.errors import ClusterError

# Slurm's own steps (batch, interactive, extern), which srun did not start, have the highest 32-bit numbers.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
# Whose presence means that srun offers MPI a way to connect the tasks: PMIx, PMI2, Cray's, and Slurm's own PMI.
_PMI = ("PMIX_RANK", "PMIX_NAMESPACE", "PMI_RANK", "PMI_FD", "PMI_CONTROL_PORT", "I_MPI_PMI_LIBRARY")
_NAMES = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


def in_step(env: Mapping[str, str]) -> bool:
    """Returns whether `srun` started this process, or a parent of it."""
    step = env.get("SLURM_STEP_ID", "")
    return "SLURM_STEP_NUM_TASKS" in env and not (
        step == "" or (step.isascii() and step.isdecimal() and int(step[:19]) >= _FIRST_RESERVED_STEP)
    )


def has_pmi(env: Mapping[str, str]) -> bool:
    """Returns whether `srun` has told MPI how to connect the tasks of its step (`srun --mpi=pmix`, `--mpi=pmi2`)."""
    return any(name in env for name in _PMI)


def slurm(env: Mapping[str, str]) -> ClusterInfo | str:
    """Reads the variables of a Slurm step; see `Reader`.

    `SLURM_NTASKS` and `SLURM_PROCID` are set in a batch script, too; only the variables of a step mean a launch.
    """
    if not in_step(env):
        if "SLURM_JOB_ID" in env:
            return "a Slurm job, but not a step of it: srun did not start this process"
        return "no Slurm step: SLURM_STEP_ID and SLURM_STEP_NUM_TASKS are not set"
    integer(env, "SLURM_STEP_ID", minimum=0)
    size = integer(env, "SLURM_STEP_NUM_TASKS", minimum=1)
    local_size = _local_size(env, size)
    return ClusterInfo(
        launcher="slurm",
        rank=integer(env, "SLURM_PROCID", minimum=0, below=("SLURM_STEP_NUM_TASKS", size)),
        size=size,
        local_rank=integer(env, "SLURM_LOCALID", minimum=0, below=("the tasks on this node", local_size)),
        local_size=local_size,
        reason=quote(env, _NAMES),
    )


def _local_size(env: Mapping[str, str], size: int) -> int:
    """Reads the tasks on this node from a list like `2(x3),1`: three nodes with two tasks, one with one."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE")
    if text is None and env.get("SLURM_STEP_NUM_NODES") == "1":
        return size
    node = integer(env, "SLURM_NODEID", minimum=0) if "SLURM_NODEID" in env else 0
    first = 0
    for part in (text or "").split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if match is None:
            break
        first += int(match[2] or 1)
        if node < first:
            if 1 <= int(match[1]) <= size:
                return int(match[1])
            break
    raise ClusterError(
        f"The local size is unknown. Received: SLURM_STEP_TASKS_PER_NODE={text!r} on node {node} of a step of {size} "
        f"tasks. Expected the tasks of each node, as '2(x3),1'. Fix: start the script with srun; keep its variables."
    )
