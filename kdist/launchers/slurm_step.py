"""The tasks of a Slurm step find each other by Slurm's variables, over TCP, without MPI."""

from __future__ import annotations

import hashlib
import re
import socket
import subprocess
from collections.abc import Mapping

from kdist.cluster.info import ClusterInfo
from kdist.errors import ClusterError
from kdist.launchers.hosts.ports import PORTS
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
_SCONTROL_TIMEOUT = 30.0  # seconds


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
    first = first_node(env.get("SLURM_STEP_NODELIST", ""))
    node = env.get("SLURMD_NODENAME", first)
    name = " ".join(env.get(variable, "0") for variable in _OF_THE_START)
    member = Member(
        rank=info.rank,
        count=info.size,
        host=host_of(first, env),
        port=port_of(name),
        num_ports=0 if info.local_rank else info.local_size,  # two ranks could find the same one
        job="",
        words=_WORDS,
        meeting=name,
        # Not the way to rank 0, which may be the loopback interface.
        own_host=host_of(node, env),
        note=(node, info.local_rank, word),
    )
    with met(member, timeout) as (told, _):
        pass
    of_node = {each.note[0]: each.addresses for each in told if each.addresses}
    notes = [each.note for each in told]
    return [of_node[node][local_rank] for node, local_rank, _ in notes], [word for _, _, word in notes]


def first_node(nodes: str) -> str:
    """Returns the first name of a list of nodes as Slurm writes it.

    Example:
    >>> first_node("gpu[003-007,12]-ib,login")
    'gpu003-ib'
    """
    found = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    if found is None:
        raise ClusterError(
            f"The nodes of the step are unknown. Received: SLURM_STEP_NODELIST={nodes!r}. Expected their names, as "
            "'n[0-3],m7'. Fix: start the script with srun; keep its variables."
        )
    return re.sub(r"\[([0-9]*)[^\]]*\]", r"\1", found[0])


def port_of(name: str) -> int:
    """Returns the port at which rank 0 of a step listens, the same on all ranks."""
    return PORTS[int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % len(PORTS)]


def host_of(node: str, env: Mapping[str, str]) -> str:
    """Returns what other hosts reach a node by: its name, or the address that Slurm knows where it has none.

    Args:
        node: str, its name in Slurm.
        env: mapping of variable name to value.

    Raises:
        ClusterError: if neither is known.
    """
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError as error:
        for alias in env.get("SLURM_NODE_ALIASES", "").split(","):  # name:address:host, of nodes in a cloud
            name, _, rest = alias.partition(":")
            if name == node and (address := rest.rpartition(":")[0].strip("[]")):
                return address
        found, said = _node_address(node)
        if found:
            return found
        raise ClusterError(
            f"A node of the step has no address. Received: {node!r}: {error}; scontrol show node: {said}. Expected a "
            "name that each host knows. Fix: add it to /etc/hosts or DNS, or let `scontrol` run on the nodes."
        ) from error


def _node_address(node: str) -> tuple[str, str]:
    """Returns the address that Slurm's controller knows, or `""`, and what it said."""
    command = ["scontrol", "--oneliner", "show", "node", node]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT)
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return (found[1], "") if found else ("", (done.stdout + done.stderr).strip().rpartition("\n")[2])
