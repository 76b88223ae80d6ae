"""The nodes of a job without a launcher of their own: they meet at node 0, and end together."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping

from kdist.launchers.rendezvous import Channel, Participant, RendezvousTexts, rendezvous

START_TIMEOUT = 600.0
"""The default of `--start-timeout`, in seconds."""

_TEXTS = RendezvousTexts(
    one="node",
    number="--node-rank",
    count="--nnodes",
    port_fix="another port in --rendezvous, on all nodes",
    missing_fix="start `kdist run` on each node, and let it reach node 0 at this port; --start-timeout sets the time",
    first_fix="start `kdist run --node-rank 0` there, check --rendezvous and firewalls; --start-timeout sets the time",
)


@dataclasses.dataclass(frozen=True)
class Node:
    """One of several machines on each of which `kdist run` was started.

    Attributes:
        rank: int, its number, from 0 on.
        count: int, how many there are.
        host: str, the name or address of node 0.
        port: int, the port at which node 0 listens.
        np: int, how many ranks it starts.
        job: str, what its ranks run, which is the same on all nodes.
    """

    rank: int
    count: int
    host: str
    port: int
    np: int
    job: str


class NodeGroup:
    """The nodes of a job, after all have come; a failed node ends the others.

    Attributes:
        first: int, the rank of this node's first process.
        addresses: list of str, of all ranks.
    """

    def __init__(self, node: Node, addresses: list[list[str]], channels: Mapping[int, Channel]) -> None:
        self._node = node
        self._channels = channels
        self._lock = threading.Lock()
        self._running = set(channels)  # the other nodes that have not ended
        self._all_ended = threading.Event()
        if not self._running:  # it is the only node
            self._all_ended.set()
        self._is_over = False
        self.first = sum(map(len, addresses[: node.rank]))
        self.addresses = [address for each in addresses for address in each]

    def watch(self, on_failure: Callable[[int, str], None]) -> None:
        """Calls `on_failure(code, text)`, in another thread, when another node fails or is lost."""

        def read(rank: int, channel: Channel) -> None:
            said = channel.read() or {"code": 1, "text": f"node {rank} of {self._node.count} was lost"}
            with self._lock:
                self._running.discard(rank)
                if not self._running:
                    self._all_ended.set()
                is_failure = said["code"] and not self._is_over
                self._is_over = self._is_over or is_failure
            if is_failure:
                self._tell(said["code"], said["text"])  # node 0 is the one that all others hear
                on_failure(said["code"], said["text"])

        for rank, channel in self._channels.items():
            threading.Thread(target=read, args=(rank, channel), name="kdist-node", daemon=True).start()

    def end(self, code: int) -> None:
        """Ends this node with an exit code: a failure ends the others, and node 0 waits until they have ended well."""
        if self._node.rank == 0 and code == 0:
            self._all_ended.wait()
        with self._lock:
            self._is_over = True
        self._tell(code, f"node {self._node.rank} of {self._node.count} ended with code {code}")

    def _tell(self, code: int, text: str) -> None:
        for channel in self._channels.values():
            channel.write(code=code, text=text)


@contextlib.contextmanager
def joined(node: Node, timeout: float) -> Iterator[NodeGroup]:
    """Waits until all nodes of a job have come, and yields their `NodeGroup`.

    Args:
        node: `Node`, this one.
        timeout: float, seconds.

    Raises:
        LaunchError: if a node does not come in time, or they are not of one job.
    """
    participant = Participant(node.rank, node.count, node.host, node.port, node.np, node.job, _TEXTS)
    with rendezvous(participant, timeout) as (infos, channels):
        yield NodeGroup(node, [each.addresses for each in infos], channels)
