"""The nodes of a Slurm step: the first one's name, and what other hosts reach a node by."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping

from kdist.errors import ClusterError

_SCONTROL_TIMEOUT = 30.0  # seconds


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
