"""Who of a cluster is there: every other task holds a line to the chief, and learns from it how the chief ends.

The chief listens at its address in the cluster; TensorFlow's own traffic goes by another port. A line that ends
without a word means that the process at its other end is lost, whoever is asked.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kdist.errors import ClusterError, ClusterLostError

logger = logging.getLogger("kdist")

_DONE = b"done\n"
_FAILED = b"failed\n"
_RETRY = 0.1  # seconds between two attempts to reach the chief
_NEWS = 2.0  # seconds
_BEAT = 2.0  # seconds after which a task says again that it is there
_HELLO_LIMIT = 10.0  # seconds that who connects has to say who it is
_MAX_HELLO = 1 << 20  # bytes

Cluster = Mapping[str, Sequence[str]]


def task_name(job: str, index: int) -> str:
    """Returns what a task is called in messages, as `worker 1`."""
    return f"{job} {index}"


class Attendance:
    """The chief's list of who is there. Evaluators come and go: nobody waits for them.

    Args:
        cluster: mapping of job name to addresses; the chief's is where it listens.
        timeout: float, seconds that tasks have to appear, and that training waits when no worker is left.

    Raises:
        ClusterError: if the chief's port is taken.
    """

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        self._cluster = {job: list(addresses) for job, addresses in cluster.items()}
        self._timeout = timeout
        self._tasks = {
            task_name(job, index): address
            for job in ("worker", "ps")
            for index, address in enumerate(cluster.get(job, ()))
        }
        self._lines: dict[str, socket.socket] = {}
        self._heard: dict[str, int] = {}
        self._lost: dict[str, float] = {}
        self._strangers: list[str] = []
        self._changed = threading.Condition()
        self._is_over = False
        self._listener = _listen(cluster["chief"][0])
        threading.Thread(target=self._accept, name="kdist-attendance", daemon=True).start()

    def wait_for_all(self) -> None:
        """Returns when every task is there.

        Raises:
            ClusterError: if some do not appear within the time limit; it names them.
        """
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while missing := [name for name in self._tasks if name not in self._lines]:
                if self._strangers:
                    raise ClusterError(self._strangers[0])
                if not self._changed.wait(deadline - time.monotonic()):
                    named = ", ".join(map(self._described, missing))
                    raise ClusterError(
                        f"Tasks of the cluster do not appear. Received: nothing from {named} for "
                        f"{self._timeout:.0f} s. Expected every worker and ps of TF_CONFIG to enter kdist.scope(). "
                        "Fix: see whether they were started, and what they said; or give them longer by "
                        "kdist.ParameterServer(timeout=...)."
                    )

    @property
    def workers(self) -> list[str]:
        """The names of all workers of the cluster."""
        return [name for name in self._tasks if name.startswith("worker ")]

    def heard(self) -> dict[str, int]:
        """Returns how often each worker that is there, and each ps, has said so; one that is stopped does not."""
        with self._changed:
            lost = [name for name in self._lost if name.startswith("ps ")]
            return {name: self._heard[name] for name in {**self._lines, **dict.fromkeys(lost)} if name in self._tasks}

    def wait_for_news(self) -> None:
        """Waits a moment, in which a line may break: TensorFlow may notice a loss before the operating system."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost, _NEWS)

    def check(self) -> None:
        """Raises if training cannot go on.

        Raises:
            ClusterLostError: if a ps is lost, or no worker has been there for longer than the time limit.
        """
        with self._changed:
            # A ps that is there again has nothing of the model.
            gone = [name for name in self._lost if name not in self._lines or name.startswith("ps ")]
            for name in gone:
                if name.startswith("ps "):
                    raise ps_lost(self._described(name))
            if set(self.workers) <= set(gone):
                since = time.monotonic() - max(self._lost[name] for name in self.workers)
                if since > self._timeout:
                    raise ClusterLostError(
                        f"No worker is left. Received: {', '.join(self.workers)} lost, the last one {since:.0f} s ago. "
                        "Expected one to be started again. Fix: start the job again; "
                        "keras.callbacks.BackupAndRestore makes it resume."
                    )

    def dismiss(self, *, well: bool) -> None:
        """Tells every other task how the chief ends, and stops listening. Doing it twice does nothing.

        Args:
            well: bool, whether they shall end with exit code 0.
        """
        with self._changed:
            lines, self._is_over = list(self._lines.values()), True
            self._lines.clear()
        _close(self._listener)
        for line in lines:
            with contextlib.suppress(OSError):
                line.sendall(_DONE if well else _FAILED)
            _close(line)

    def _described(self, name: str) -> str:
        return f"{name} ({self._tasks[name]})" if name in self._tasks else name

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._attend, args=(line,), name="kdist-attendance", daemon=True).start()

    def _attend(self, line: socket.socket) -> None:
        """Follows one line to its end."""
        name = None
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            line.settimeout(_HELLO_LIMIT)
            hello = json.loads(_read_line(line))
            if hello["cluster"] != self._cluster:
                self._refuse(line, f"{hello['task']} has another cluster: {json.dumps(hello['cluster'])}")
            elif hello["task"] in self._tasks or hello["task"].startswith("evaluator "):
                name = str(hello["task"])
        if name is None:
            _close(line)
            return
        _keep_alive(line)
        with self._changed:
            if self._is_over:
                _close(line)
                return
            if name in self._lost and not name.startswith("ps "):
                logger.warning("%s is there again", name)
                del self._lost[name]
            self._lines[name] = line
            self._heard[name] = self._heard.get(name, 0)
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            while line.recv(1024):
                self._heard[name] += 1
        with self._changed:
            if not self._is_over and self._lines.get(name) is line:
                del self._lines[name]
                self._lost[name] = time.monotonic()
                logger.warning("%s is lost", self._described(name))
                self._changed.notify_all()
        _close(line)

    def _refuse(self, line: socket.socket, why: str) -> None:
        with self._changed:
            self._strangers.append(
                f"The tasks disagree about the cluster. Received: {why}, where the chief has "
                f"{json.dumps(self._cluster)}. Expected the same in each task's TF_CONFIG. Fix: give all the same."
            )
            self._changed.notify_all()


class Line:
    """A task's line to the chief.

    Args:
        cluster: mapping of job name to addresses.
        job: str, `"worker"`, `"ps"` or `"evaluator"`.
        index: int, this task's index.
        timeout: float, seconds that the chief has to appear.

    Raises:
        ClusterError: if it does not.
    """

    def __init__(self, cluster: Cluster, job: str, index: int, timeout: float) -> None:
        self._address = cluster["chief"][0]
        self._timeout = timeout
        self._is_over = False
        self._socket = self._connect()
        hello = {
            "task": task_name(job, index),
            "cluster": {each: list(addresses) for each, addresses in cluster.items()},
        }
        _keep_alive(self._socket)
        with contextlib.suppress(OSError):  # the chief is gone again: `wait` says so
            self._socket.sendall(json.dumps(hello).encode() + b"\n")

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the chief to be done.

        Args:
            seconds: float, how long to wait at most, or `None` for ever.

        Returns:
            Whether the chief is done.

        Raises:
            ClusterLostError: if the chief failed or is lost.
        """
        if self._is_over:
            return True
        while not select.select([self._socket], [], [], _BEAT if seconds is None else seconds)[0]:
            with contextlib.suppress(OSError):  # the line is broken: that is read
                self._socket.sendall(b".")
            if seconds is not None:
                return False
        said = b""
        with contextlib.suppress(OSError):
            said = _read_line(self._socket)
        _close(self._socket)
        if said != _DONE.strip():
            what = "the chief failed" if said == _FAILED.strip() else "the line to the chief broke"
            raise ClusterLostError(
                f"The chief is lost. Received: {what} (chief 0, {self._address}). Expected it to train to the end. "
                "Fix: see what the chief said; start the job again."
            )
        self._is_over = True
        return True

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return socket.create_connection(_host_port(self._address), timeout=max(1.0, _HELLO_LIMIT))
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"The chief does not appear. Received: {error} from chief 0 ({self._address}) for "
                        f"{self._timeout:.0f} s. Expected the chief of TF_CONFIG to enter kdist.scope(). Fix: see "
                        "whether it was started, and what it said; or give it longer by "
                        "kdist.ParameterServer(timeout=...)."
                    ) from error
            time.sleep(_RETRY)


def ps_lost(which: str) -> ClusterLostError:
    """Returns the error for a ps that is gone."""
    return ClusterLostError(
        f"A ps is lost, and with it variables of the model. Received: {which} gone. Expected it to serve to the end. "
        "Fix: start the job again; keras.callbacks.BackupAndRestore makes it resume from the last checkpoint."
    )


def _listen(address: str) -> socket.socket:
    host, port = _host_port(address)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind((host, port))
        except OSError as error:
            if _is_taken(error):
                raise
            listener.bind(("", port))  # the name is that of a gateway, say, and no interface of this machine
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise port_taken("chief 0", address, error) from error
    return listener


def _is_taken(error: OSError) -> bool:
    return error.errno in (errno.EADDRINUSE, errno.EACCES)


def port_taken(task: str, address: str, error: Exception) -> ClusterError:
    """Returns the error for a task that cannot have its port."""
    return ClusterError(
        f"A task cannot listen at its address. Received: {error} for {task} at {address}. Expected a port that is "
        "free. Fix: end what uses it, or give the task another port in TF_CONFIG."
    )


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _read_line(line: socket.socket) -> bytes:
    said = b""
    while not said.endswith(b"\n") and len(said) < _MAX_HELLO and (piece := line.recv(4096)):
        said += piece
    return said.strip()


def _keep_alive(line: socket.socket) -> None:
    """Waits for the other end without limit, and learns within half a minute that its machine is gone."""
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options: dict[str, Any] = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
    for name, value in options.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _close(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()
