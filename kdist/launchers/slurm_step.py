"""The tasks of a Slurm step find each other by Slurm's variables, over TCP, without MPI."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from kdist.cluster.info import ClusterInfo
from kdist.launchers.hosts.ports import PORTS
from kdist.launchers.hosts.slurm_nodes import first_node, host_of
from kdist.launchers.meeting import Member, Words, met

_WORDS = Words(
    one="rank",
    number="SLURM_PROCID",
    count="SLURM_STEP_NUM_TASKS",
    port_fix="start the job again: its number decides the port",
    missing_fix=(
        "look for a rank that has failed before kdist.scope() (`srun --kill-on-bad-exit` ends the others then), open "
        "the ports between the hosts, or wait longer: kdist.scope(kdist.AllReduce(start_timeout=...))"
    ),
    first_fix="look at what rank 0 says, and open the ports between the hosts",
)

# What makes a step and its start: another one meets at another port.
_OF_THE_START = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")


def exchange(info: ClusterInfo, env: Mapping[str, str], timeout: float, word: str) -> tuple[list[str], list[str]]:
    """Waits until all tasks of this process's step have come to rank 0.

    Collective: every rank must call this, in the same order.

    Args:
        info: `ClusterInfo` of a task that `srun` started.
        env: mapping of variable name to value.
        timeout: float, seconds.
        word: str, for the others.

    Returns:
        Two lists of str: `"host:port"` of each rank, with a port that was free on its host, and the word of each.

    Raises:
        ClusterError: if the name of a node has no address.
        LaunchError: if a rank does not come in time.
    """
    # Two ranks of a node could find the same port.
    member = _member(info, env, _name(env), 0 if info.local_rank else info.local_size, word)
    with met(member, timeout) as (told, _):
        pass
    of_node = {each.note[0]: each.addresses for each in told if each.addresses}
    notes = [each.note for each in told]
    return [of_node[node][local_rank] for node, local_rank, _ in notes], [word for _, _, word in notes]


def words_of_all(info: ClusterInfo, env: Mapping[str, str], timeout: float, word: str) -> list[tuple[str, str]]:
    """Returns the node and a word of each task of this process's step, in rank order.

    Collective: every rank must call this, in the same order.

    Args:
        info: `ClusterInfo` of a task that `srun` started.
        env: mapping of variable name to value.
        timeout: float, seconds.
        word: str, for the others.

    Raises:
        ClusterError: if the name of a node has no address.
        LaunchError: if a rank does not come in time.
    """
    with met(_member(info, env, f"{_name(env)} words", 0, word), timeout) as (told, _):
        pass
    return [(node, word) for node, _, word in (each.note for each in told)]


def _name(env: Mapping[str, str]) -> str:
    return " ".join(env.get(variable, "0") for variable in _OF_THE_START)


def _member(info: ClusterInfo, env: Mapping[str, str], meeting: str, num_ports: int, word: str) -> Member:
    first = first_node(env.get("SLURM_STEP_NODELIST", ""))
    node = env.get("SLURMD_NODENAME", first)
    return Member(
        rank=info.rank,
        count=info.size,
        host=host_of(first, env),
        port=port_of(meeting),
        num_ports=num_ports,
        job="",
        words=_WORDS,
        meeting=meeting,
        # Not the way to rank 0, which may be the loopback interface.
        own_host=host_of(node, env),
        note=(node, info.local_rank, word),
    )


def port_of(name: str) -> int:
    """Returns the port at which rank 0 of a step listens, the same on all ranks."""
    return PORTS[int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % len(PORTS)]
