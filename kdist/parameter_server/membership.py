"""The chief's view of the cluster: which tasks have joined, and which are lost."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time

from kdist.errors import ClusterError, ClusterLostError
from kdist.parameter_server import connection as connections
from kdist.parameter_server.connection import Cluster, task_name

logger = logging.getLogger("kdist")

_LOSS_TIMEOUT = 2.0  # seconds
_PAUSE = 0.1  # seconds before a connection is accepted again


class Membership:
    """The tasks that are connected to the chief. Evaluators may join and leave: nothing waits for them.

    Args:
        cluster: mapping of job name to addresses; the chief listens at its own.
        timeout: float, seconds within which tasks must join, and for which training waits when no worker is left.

    Raises:
        ClusterError: if the chief's port is in use.
    """

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        self._cluster = {job: list(addresses) for job, addresses in cluster.items()}
        self._timeout = timeout
        self._tasks = {
            task_name(job, index): address
            for job in ("worker", "ps")
            for index, address in enumerate(cluster.get(job, ()))
        }
        self._connections: dict[str, socket.socket] = {}
        self._heartbeats: dict[str, int] = {}
        self._lost_at: dict[str, float] = {}
        self._rejections: list[str] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._listener = connections.listen(cluster["chief"][0])
        threading.Thread(target=self._accept, name="kdist-membership", daemon=True).start()

    def wait_for_all(self) -> None:
        """Returns when every worker and ps has joined.

        Raises:
            ClusterError: if some do not join within the time limit; it names them.
        """
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while missing := [name for name in self._tasks if name not in self._connections]:
                if self._rejections:
                    raise ClusterError(self._rejections[0])
                if not self._changed.wait(min(deadline - time.monotonic(), threading.TIMEOUT_MAX)):
                    raise ClusterError(
                        "Some tasks of the cluster have not joined. Received: no connection from "
                        f"{', '.join(map(self._with_address, missing))} within {self._timeout:.0f} s. Expected every "
                        "worker and ps of TF_CONFIG to enter kdist.scope(). Fix: check whether they were started, and "
                        "their logs; or raise the limit by kdist.ParameterServer(timeout=...)."
                    )

    @property
    def workers(self) -> list[str]:
        """The names of all workers of the cluster."""
        return [name for name in self._tasks if name.startswith("worker ")]

    def heartbeats(self) -> dict[str, int]:
        """Returns how many heartbeats were received from each connected worker, and from each ps, lost or not."""
        with self._changed:
            lost = [name for name in self._lost_at if _is_ps(name)]
            names = {**self._connections, **dict.fromkeys(lost)}
            return {name: self._heartbeats[name] for name in names if name in self._tasks}

    def wait_for_loss(self) -> None:
        """Waits a moment for a connection to break: TensorFlow may notice a loss before the operating system."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost_at, _LOSS_TIMEOUT)

    def check(self) -> None:
        """Raises if training cannot continue.

        Raises:
            ClusterLostError: if a ps is lost, or all workers have been lost for longer than the time limit.
        """
        with self._changed:
            for name in filter(_is_ps, self._lost_at):  # one that has joined again holds nothing of the model
                raise ps_lost(f"the connection to {self._with_address(name)} broke")
            # A worker that joins again is no longer in `_lost_at`.
            if self._lost_at.keys() >= set(self.workers):
                since = time.monotonic() - max(self._lost_at[name] for name in self.workers)
                if since > self._timeout:
                    raise ClusterLostError(
                        f"All workers are lost. Received: {', '.join(self.workers)} lost, the last one {since:.0f} s "
                        f"ago. Expected one to be started again within {self._timeout:.0f} s. Fix: start the job "
                        "again; keras.callbacks.BackupAndRestore makes it resume."
                    )

    def close(self, *, success: bool) -> None:
        """Sends every other task how the chief ends, and stops listening. A second call does nothing.

        Args:
            success: bool, whether the tasks are to end with exit code 0.
        """
        with self._changed:
            joined, self._is_closed = list(self._connections.values()), True
            self._connections.clear()
        connections.close(self._listener)
        for connection in joined:
            with contextlib.suppress(OSError):
                connection.sendall((connections.SUCCEEDED if success else connections.FAILED) + b"\n")
            connections.close(connection)

    def _with_address(self, name: str) -> str:
        return f"{name} ({self._tasks[name]})" if name in self._tasks else name

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_PAUSE)  # too many open files, say: the connection waits
                continue
            threading.Thread(target=self._follow, args=(connection,), name="kdist-membership", daemon=True).start()

    def _follow(self, connection: socket.socket) -> None:
        """Registers the task of a new connection, and counts its heartbeats until the connection ends."""
        name = None
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            connection.settimeout(connections.CONNECT_TIMEOUT)
            registration = json.loads(connections.read_line(connection))
            if registration["cluster"] != self._cluster:
                self._reject(registration)
            elif registration["task"] in self._tasks or registration["task"].startswith("evaluator "):
                name = str(registration["task"])
        if name is not None:
            connections.keep_alive(connection)
            with contextlib.suppress(OSError):  # it has ended, which the next read shows
                connection.sendall(connections.JOINED)
            self._set_joined(name, connection)
            with contextlib.suppress(OSError):
                while connection.recv(1024):
                    self._heartbeats[name] += 1
            self._set_lost(name, connection)
        connections.close(connection)

    def _set_joined(self, name: str, connection: socket.socket) -> None:
        with self._changed:
            if self._is_closed:
                connections.close(connection)
                return
            if name in self._lost_at and not _is_ps(name):
                logger.warning("%s has joined again", name)
                del self._lost_at[name]
            self._connections[name] = connection
            self._heartbeats.setdefault(name, 0)
            self._changed.notify_all()

    def _set_lost(self, name: str, connection: socket.socket) -> None:
        with self._changed:
            if not self._is_closed and self._connections.get(name) is connection:
                del self._connections[name]
                self._lost_at[name] = time.monotonic()
                logger.warning("%s is lost", self._with_address(name))
                self._changed.notify_all()

    def _reject(self, registration: dict[str, str]) -> None:
        with self._changed:
            self._rejections.append(
                f"The tasks have different clusters. Received: {registration['task']} has "
                f"{json.dumps(registration['cluster'])}, where the chief has {json.dumps(self._cluster)}. Expected the "
                "same cluster in each task's TF_CONFIG. Fix: give all tasks the same."
            )
            self._changed.notify_all()


def ps_lost(received: str) -> ClusterLostError:
    """Returns the error of a lost ps.

    Args:
        received: str, how the loss was noticed.
    """
    return ClusterLostError(
        f"A ps is lost, and with it variables of the model. Received: {received}. Expected it to serve until training "
        "ends. Fix: start the job again; keras.callbacks.BackupAndRestore makes it resume from the last checkpoint."
    )


def _is_ps(name: str) -> bool:
    return name.startswith("ps ")
