"""The tasks of a Slurm step find each other by Slurm's variables, over TCP, without MPI."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from kdist.cluster.info import ClusterInfo
from kdist.launchers.hosts.ports import PORTS
from kdist.launchers.hosts.slurm_nodes import first_node, host_of
from kdist.launchers.rendezvous import Participant, ParticipantInfo, RendezvousTexts, rendezvous

_TEXTS = RendezvousTexts(
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

# What makes a step and its start: another one has its rendezvous at another port.
_OF_THE_START = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")


def exchange(info: ClusterInfo, env: Mapping[str, str], timeout: float, payload: str) -> tuple[list[str], list[str]]:
    """Waits until all tasks of this process's step have come to rank 0.

    Collective: every rank must call this, in the same order.

    Args:
        info: `ClusterInfo` of a task that `srun` started.
        env: mapping of variable name to value.
        timeout: float, seconds.
        payload: str, which every other task receives.

    Returns:
        Two lists of str: `"host:port"` of each rank, with a port that was free on its host, and the payload of each.

    Raises:
        ClusterError: if the name of a node has no address.
        LaunchError: if a rank does not come in time.
    """
    # Two ranks of a node could find the same port.
    infos = _gather(info, env, timeout, payload, name=_name(env), num_ports=0 if info.local_rank else info.local_size)
    of_node = {each.payload[0]: each.addresses for each in infos if each.addresses}
    sent = [each.payload for each in infos]
    return [of_node[node][local_rank] for node, local_rank, _ in sent], [payload for _, _, payload in sent]


def payloads_of_all(info: ClusterInfo, env: Mapping[str, str], timeout: float, payload: str) -> list[tuple[str, str]]:
    """Returns the node and the payload of each task, in rank order; takes and raises the same as `exchange`.

    Collective: every rank must call this, in the same order.
    """
    infos = _gather(info, env, timeout, payload, name=f"{_name(env)} payloads", num_ports=0)
    return [(node, payload) for node, _, payload in (each.payload for each in infos)]


def _name(env: Mapping[str, str]) -> str:
    return " ".join(env.get(variable, "0") for variable in _OF_THE_START)


def _gather(
    info: ClusterInfo, env: Mapping[str, str], timeout: float, payload: str, *, name: str, num_ports: int
) -> list[ParticipantInfo]:
    first = first_node(env.get("SLURM_STEP_NODELIST", ""))
    node = env.get("SLURMD_NODENAME", first)
    participant = Participant(
        rank=info.rank,
        count=info.size,
        host=host_of(first, env),
        port=port_of(name),
        num_ports=num_ports,
        job="",
        texts=_TEXTS,
        name=name,
        # Not the way to rank 0, which may be the loopback interface.
        own_host=host_of(node, env),
        payload=(node, info.local_rank, payload),
    )
    with rendezvous(participant, timeout) as (infos, _):
        return infos


def port_of(name: str) -> int:
    """Returns the port at which rank 0 of a step listens, the same on all ranks."""
    return PORTS[int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % len(PORTS)]
