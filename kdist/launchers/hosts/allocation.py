"""What a scheduler has allocated to a job: on how many hosts, for how many ranks, and whether it is elsewhere."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from kdist.errors import ClusterError
from kdist.launchers.hosts import reach
from kdist.launchers.hosts.slurm_nodes import first_node


@dataclasses.dataclass(frozen=True)
class Allocation:
    """The hosts that a scheduler has allocated, which mpirun then uses.

    Attributes:
        ranks: int or `None`, for how many ranks.
        why: str, what tells that number; else what the scheduler does not tell.
        is_here: bool, whether this host is known to be the only one.
    """

    ranks: int | None
    why: str
    is_here: bool


def allocation_of(env: Mapping[str, str]) -> Allocation | None:
    """Returns the allocation of Slurm, PBS, LSF or Grid Engine that this process runs in; `None` outside of any.

    Args:
        env: mapping of variable name to value.

    Example:
    >>> found = allocation_of({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4"})
    >>> found.ranks, found.why
    (8, 'SLURM_NTASKS_PER_NODE=4, SLURM_JOB_NUM_NODES=2')
    """
    for name, read in _SCHEDULERS.items():
        if name in env:
            return read(env)
    return None


def is_elsewhere(env: Mapping[str, str]) -> bool:
    """Returns whether a scheduler has allocated hosts, and not this one alone.

    Args:
        env: mapping of variable name to value.
    """
    found = allocation_of(env)
    return found is not None and not found.is_here


def _slurm(env: Mapping[str, str]) -> Allocation:
    nodes = _number(env, "SLURM_JOB_NUM_NODES") or _number(env, "SLURM_NNODES")
    is_here = nodes == 1 and _is_this_node(env)
    if tasks := _number(env, "SLURM_NTASKS"):
        return Allocation(tasks, f"SLURM_NTASKS={tasks}", is_here)
    if nodes and (tasks := _number(env, "SLURM_NTASKS_PER_NODE")):
        return Allocation(tasks * nodes, f"SLURM_NTASKS_PER_NODE={tasks}, SLURM_JOB_NUM_NODES={nodes}", is_here)
    return Allocation(None, "SLURM_NTASKS", is_here)


def _is_this_node(env: Mapping[str, str]) -> bool:
    try:
        node = first_node(env.get("SLURM_JOB_NODELIST", ""))
    except ClusterError:
        return False
    # `salloc` may leave its shell on a login node. What slurmd has started knows its node, whose name may be no host's.
    return node == env["SLURMD_NODENAME"] if "SLURMD_NODENAME" in env else reach.is_this_host(node)


def _pbs(env: Mapping[str, str]) -> Allocation:
    lines = _lines(env["PBS_NODEFILE"])  # one a rank
    return Allocation(len(lines) or None, f"the lines of PBS_NODEFILE={env['PBS_NODEFILE']}", _is_this({*lines}))


def _lsf(env: Mapping[str, str]) -> Allocation:
    ranks = _number(env, "LSB_DJOB_NUMPROC")
    why = "LSB_DJOB_NUMPROC" if ranks is None else f"LSB_DJOB_NUMPROC={ranks}"
    return Allocation(ranks, why, _is_this({*env["LSB_MCPU_HOSTS"].split()[::2]}))


def _grid_engine(env: Mapping[str, str]) -> Allocation:
    ranks = _number(env, "NSLOTS")
    hosts = {line.split()[0] for line in _lines(env["PE_HOSTFILE"])}
    return Allocation(ranks, "NSLOTS" if ranks is None else f"NSLOTS={ranks}", _is_this(hosts))


def _is_this(hosts: set[str]) -> bool:
    return len(hosts) == 1 and all(map(reach.is_this_host, hosts))


def _lines(path: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # a shell may have taken the variable along to another host
        return []
    return [line for line in map(str.strip, text.splitlines()) if line]


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    return int(text) if re.fullmatch(r"0{0,9}[1-9][0-9]{0,8}", text) else None


# The variable by which each scheduler is known.
_SCHEDULERS = {"SLURM_JOB_ID": _slurm, "PBS_NODEFILE": _pbs, "LSB_MCPU_HOSTS": _lsf, "PE_HOSTFILE": _grid_engine}
