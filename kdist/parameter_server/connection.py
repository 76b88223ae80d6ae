"""The connection between a task and the chief, by which each notices how the other ends.

The chief listens at its address in the cluster; TensorFlow's own traffic uses another port. Whichever end of a
connection breaks without a last message has failed.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from kdist.cluster import connections
from kdist.errors import ClusterError, ClusterLostError

JOINED = b"+"
"""What the chief answers to a registration."""
SUCCEEDED = b"succeeded"
FAILED = b"failed"
CONNECT_TIMEOUT = 10.0
"""Seconds that a new connection has to be made, and to send its registration."""

_RETRY_INTERVAL = 0.1  # seconds between two attempts to reach the chief
_HEARTBEAT_INTERVAL = 2.0  # seconds
_MAX_MESSAGE = 1 << 20  # bytes

Cluster = Mapping[str, Sequence[str]]
"""Job name to addresses."""


def task_name(job: str, index: int) -> str:
    """Returns what a task is called in messages, as `worker 1`."""
    return f"{job} {index}"


class ChiefConnection:
    """A task's end of its connection to the chief.

    Args:
        cluster: mapping of job name to addresses.
        job: str, `"worker"`, `"ps"` or `"evaluator"`.
        index: int, this task's index.
        timeout: float, seconds within which the chief must be reached.

    Raises:
        ClusterError: if it is not, or if what listens there is no chief.
    """

    def __init__(self, cluster: Cluster, job: str, index: int, timeout: float) -> None:
        self._address = cluster["chief"][0]
        self._is_over = False
        self._socket = self._connect(timeout)
        registration = {
            "task": task_name(job, index),
            "cluster": {each: list(addresses) for each, addresses in cluster.items()},
        }
        self._socket.settimeout(min(timeout, threading.TIMEOUT_MAX))
        answer = b""
        try:
            self._socket.sendall(json.dumps(registration).encode() + b"\n")
            answer = self._socket.recv(len(JOINED))
        except TimeoutError:
            raise self._no_chief(f"no answer within {timeout:.0f} s") from None
        except OSError:  # the chief has ended: `wait` raises
            pass
        if answer not in (JOINED, b""):
            raise self._no_chief("another answer than a chief's")
        keep_alive(self._socket)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the chief has finished, and sends heartbeats.

        Args:
            seconds: float, how long to wait at most, or `None` for no limit.

        Returns:
            Whether the chief has finished.

        Raises:
            ClusterLostError: if the chief failed or is lost.
        """
        if self._is_over:
            return True
        while not select.select([self._socket], [], [], _HEARTBEAT_INTERVAL if seconds is None else seconds)[0]:
            with contextlib.suppress(OSError):  # the connection is broken, which the next read shows
                self._socket.sendall(b".")
            if seconds is not None:
                return False
        message = b""
        with contextlib.suppress(OSError):
            message = read_line(self._socket)
        close(self._socket)
        if message != SUCCEEDED:
            received = "the chief failed" if message == FAILED else "the connection to the chief broke"
            raise ClusterLostError(
                f"The chief is lost. Received: {received} (chief 0, {self._address}). Expected it to train to the end. "
                "Fix: see the chief's log for the cause, then start the job again."
            )
        self._is_over = True
        return True

    def _no_chief(self, received: str) -> ClusterError:
        close(self._socket)
        return ClusterError(
            f"What listens at the chief's address is no chief. Received: {received} from chief 0 ({self._address}). "
            "Expected the chief of TF_CONFIG in kdist.scope(). Fix: end the process that uses this port, or give the "
            "chief another one in TF_CONFIG."
        )

    def _connect(self, timeout: float) -> socket.socket:
        deadline = time.monotonic() + timeout
        while True:
            try:
                return socket.create_connection(connections.host_and_port(self._address), timeout=CONNECT_TIMEOUT)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"The chief cannot be reached. Received: {error} from chief 0 ({self._address}) for "
                        f"{timeout:.0f} s. Expected the chief of TF_CONFIG to enter kdist.scope(). Fix: check whether "
                        "it was started, and its log; or raise the limit by kdist.ParameterServer(timeout=...)."
                    ) from error
            time.sleep(_RETRY_INTERVAL)


def listen(address: str) -> socket.socket:
    """Returns the socket at which the chief listens.

    Raises:
        ClusterError: if its port is in use.
    """
    host, port = connections.host_and_port(address)
    try:
        return connections.listen(host, port, backlog=128)
    except OSError as error:
        raise port_in_use("chief 0", address, error) from error


def port_in_use(task: str, address: str, error: Exception) -> ClusterError:
    """Returns the error of a task that cannot listen at its port."""
    return ClusterError(
        f"A task cannot listen at its address. Received: {error} for {task} at {address}. Expected a port that is "
        "free. Fix: end the process that uses it, or give the task another port in TF_CONFIG."
    )


def read_line(connection: socket.socket) -> bytes:
    """Returns the next message on a connection, without its newline; empty if the connection has ended."""
    message = b""
    while not message.endswith(b"\n") and len(message) < _MAX_MESSAGE and (piece := connection.recv(4096)):
        message += piece
    return message.strip()


def keep_alive(connection: socket.socket) -> None:
    """Lets reads wait without limit, but fail within half a minute after the other end's machine is gone."""
    connection.settimeout(None)
    connections.keep_alive(connection)


def close(connection: socket.socket) -> None:
    """Closes a connection, for reads that wait in other threads too."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
