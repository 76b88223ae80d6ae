"""The nodes of a job without a launcher of their own: they meet at node 0 over TCP, and end together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from kdist.cluster.connections import keep_alive
from kdist.errors import LaunchError
from kdist.launchers.hosts.ports import free_ports

START_TIMEOUT = 600.0
"""The default of `--start-timeout`, in seconds."""

_RETRY = 0.2  # seconds between two attempts to reach node 0


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


class _Channel:
    """A connection on which each line is a JSON object."""

    def __init__(self, connection: socket.socket) -> None:
        keep_alive(connection)
        self._connection = connection
        self._reader = connection.makefile("r", encoding="utf-8")

    def write(self, **value: Any) -> None:
        """Sends an object; does nothing if the other side has gone."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(value).encode() + b"\n")

    def read(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Returns the next object; `None` after the end of the connection, or of the time in seconds."""
        try:
            self._connection.settimeout(timeout)
            said = json.loads(self._reader.readline() or "null")
            self._connection.settimeout(None)
        except (OSError, ValueError):
            return None
        return said if isinstance(said, dict) else None

    def has_ended(self) -> bool:
        """Returns whether the other side has gone; it must not be sending."""
        try:
            return self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Ends the connection, and a `read` that waits."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


class Meeting:
    """The nodes of a job, after all have come; a failed node ends the others.

    Attributes:
        first: int, the rank of this node's first process.
        addresses: list of str, of all ranks.
    """

    def __init__(self, node: Node, addresses: list[list[str]], channels: Mapping[int, _Channel]) -> None:
        self._node = node
        self._channels = channels
        self._lock = threading.Lock()
        self._running = set(channels)  # the other nodes that have not ended
        self._all_ended = threading.Event()
        self._is_over = False
        self.first = sum(map(len, addresses[: node.rank]))
        self.addresses = [address for each in addresses for address in each]

    def watch(self, on_failure: Callable[[int, str], None]) -> None:
        """Calls `on_failure(code, text)`, in another thread, when another node fails or is lost."""

        def read(rank: int, channel: _Channel) -> None:
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
def met(node: Node, timeout: float) -> Iterator[Meeting]:
    """Waits until all nodes of a job have come, and yields their `Meeting`.

    Args:
        node: `Node`, this one.
        timeout: float, seconds.

    Raises:
        LaunchError: if one does not come in time, or they are not of one job.
    """
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        meet = _lead if node.rank == 0 else _follow
        yield meet(node, deadline, timeout, stack)


def _lead(node: Node, deadline: float, timeout: float, stack: contextlib.ExitStack) -> Meeting:
    server = stack.enter_context(socket.socket())
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("", node.port))
    except OSError as error:
        raise LaunchError(
            f"Node 0 cannot listen at the rendezvous. Received: port {node.port}: {error}. Expected a port that is "
            "free on node 0. Fix: another port in --rendezvous, on all nodes."
        ) from error
    server.listen(node.count)
    channels: dict[int, _Channel] = {}
    said: dict[int, dict[str, Any]] = {0: _hello(node, node.host)}
    while len(said) < node.count:
        server.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = ", ".join(str(rank) for rank in range(node.count) if rank not in said)
            _refuse(
                channels.values(),
                f"Not all nodes have come. Received: {len(said)} of {node.count} within {timeout:g} s at "
                f"{node.host}:{node.port}; node {missing} is missing. Expected all of them. Fix: start `kdist run` on "
                "each node, and let it reach node 0 at this port; --start-timeout sets the time.",
            )
        channel = _channel(connection, stack)
        hello = channel.read(timeout=2.0)
        if hello is None or hello.keys() != said[0].keys():
            continue  # something else that has found the port
        for rank in [rank for rank, each in channels.items() if each.has_ended()]:
            del said[rank], channels[rank]  # it may come again, as a pod that was started anew
        if problem := _problem(node, hello, said):
            _refuse([*channels.values(), channel], problem)
        said[hello["rank"]], channels[hello["rank"]] = hello, channel
    addresses = [said[rank]["addresses"] for rank in range(node.count)]
    for channel in channels.values():  # one that has gone in this moment is found lost at once
        channel.write(addresses=addresses)
    return Meeting(node, addresses, channels)


def _problem(node: Node, hello: Mapping[str, Any], said: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns what is wrong with a node that has come, or `""`."""
    if hello["count"] != node.count:
        return (
            f"The nodes differ in their number. Received: --nnodes {node.count} on node 0 and {hello['count']} on node "
            f"{hello['rank']}. Expected the same on all. Fix: start all with one number."
        )
    if hello["rank"] in said:
        return (
            f"Two nodes have the number {hello['rank']}. Received: --node-rank {hello['rank']} twice. Expected each "
            f"number from 0 to {node.count - 1} once. Fix: give each node its own --node-rank."
        )
    if hello["job"] != node.job:
        return (
            f"The nodes start other programs. Received: {node.job} on node 0 and {hello['job']} on node "
            f"{hello['rank']}. Expected the same script and arguments. Fix: start the same command on all nodes."
        )
    return ""


def _refuse(channels: Iterable[_Channel], problem: str) -> NoReturn:
    for channel in channels:
        channel.write(error=problem)
    raise LaunchError(problem)


def _follow(node: Node, deadline: float, timeout: float, stack: contextlib.ExitStack) -> Meeting:
    connection = _connected(node, deadline, timeout)
    channel = _channel(connection, stack)
    channel.write(**_hello(node, connection.getsockname()[0]))
    said = channel.read(timeout=max(1.0, deadline - time.monotonic()) + 10.0)  # node 0 gives up first, and says why
    if said is None:
        raise LaunchError(
            f"Node 0 has ended before all nodes had come. Received: a closed connection to {node.host}:{node.port} on "
            f"node {node.rank}. Expected the addresses of all nodes. Fix: look at what node 0 says."
        )
    if "error" in said:
        raise LaunchError(said["error"])
    return Meeting(node, said["addresses"], {0: channel})


def _connected(node: Node, deadline: float, timeout: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((node.host, node.port), timeout=5.0)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Node 0 is not reached. Received: {error} from {node.host}:{node.port} for {timeout:g} s, on node "
                    f"{node.rank}. Expected `kdist run --node-rank 0` there. Fix: start it, check --rendezvous and "
                    "firewalls; --start-timeout sets the time."
                ) from error
            time.sleep(_RETRY)


def _hello(node: Node, host: str) -> dict[str, Any]:
    addresses = [f"{host}:{port}" for port in free_ports(node.np)]
    return {"rank": node.rank, "count": node.count, "job": node.job, "addresses": addresses}


def _channel(connection: socket.socket, stack: contextlib.ExitStack) -> _Channel:
    channel = _Channel(connection)
    stack.callback(channel.close)
    return channel
