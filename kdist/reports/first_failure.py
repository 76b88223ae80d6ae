"""Detects the first rank that died without an error message, under launchers that then kill the ranks that could.

Hydra, the mpirun of MPICH and Intel MPI, names a process id or nothing. So each rank registers with `kdist run`, which
sees which one exits first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from kdist.reports.failure import OUTPUT_DELAY
from kdist.restarts.events import Failure, Kind, append_failure
from kdist.restarts.launcher_words import killed_by

_SOCKET = "monitor"  # its name in the job's directory
_MAX_MESSAGE_BYTES = 1 << 12
_SUCCESS = b"success"
_TIMEOUT = 1.0  # seconds that the kernel may take to make a process's exit code known
_TIME_TO_EXIT = 0.5  # seconds that a launcher may take to exit once its files are closed


def is_needed(env: Mapping[str, str]) -> bool:
    """Returns whether the launcher is Hydra.

    Args:
        env: mapping of variable name to value.
    """
    return "PMI_FD" in env


def abort_command(code: int) -> bytes:
    """Returns the command of the PMI protocol that makes Hydra end the job.

    Args:
        code: int, the exit code, from 1 to 255.

    References:
        - https://github.com/pmodels/mpich/blob/main/src/pmi/maint/pmi-1.1.txt
    """
    return f"cmd=abort exitcode={code}\n".encode()


class Registration:
    """A rank's connection to `kdist run`; without a monitor there, it does nothing.

    Hydra detects a death when a rank's output and its PMI connection close. It may then reap a rank that it killed
    before the one that died, and exit with its code; and for a rank that had not initialised MPI it takes any code for
    success. So `kdist run` gets duplicates of all three descriptors, and keeps them open until it has told Hydra.

    Args:
        directory: str, the job's.
        rank: int, this process's number.
        size: int, the number of processes, all on this host.
        env: mapping of variable name to value, for which `is_needed`.
    """

    def __init__(self, directory: str, rank: int, size: int, env: Mapping[str, str]) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        message = json.dumps({"name": f"{rank} of {size} on host {platform.node()}", "pid": os.getpid()}).encode()
        with contextlib.suppress(OSError, ValueError):
            self._connection.connect(str(Path(directory, _SOCKET)))
            socket.send_fds(self._connection, [message], [int(env["PMI_FD"]), 1, 2])

    def report_success(self) -> None:
        """Reports that this process exits without an error."""
        self._send(_SUCCESS)
        self._connection.close()

    def report_failure(self, code: int) -> None:
        """Reports that the failure has been printed: ranks that die from now on are a consequence.

        Args:
            code: int, the exit code of the job.
        """
        self._send(str(code).encode())

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(message)


class FailureMonitor:
    """Monitors the ranks of a job on this host, in a thread, and reports the first to die without an error message.

    Args:
        directory: str, the job's.

    Attributes:
        code: int or `None`, the exit code of the job, where it is known.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.code: int | None = None
        self._is_reported = False
        self._exited_with_0: _Rank | None = None
        self._ranks: dict[int, _Rank] = {}  # by the descriptor that is readable once the process has exited
        self._listener = socket.socket(socket.AF_UNIX)
        self._wake, self._woken = socket.socketpair()
        self._launcher: int | None = None  # a descriptor, readable once it has exited
        self._thread = threading.Thread(target=self._run, name="kdist-monitor", daemon=True)
        with contextlib.suppress(OSError, AttributeError):  # a path that is too long; a system that is not Linux
            self._poll = select.epoll()
            self._listener.bind(str(Path(directory, _SOCKET)))
            self._listener.listen()
            for each in (self._listener, self._woken):
                self._poll.register(each, select.EPOLLIN)
            self._thread.start()

    def watch_launcher(self, pid: int) -> None:
        """Takes ranks that are killed with the launcher for a consequence: Hydra's proxies kill them then.

        Args:
            pid: int, the launcher's process id.
        """
        with contextlib.suppress(OSError, AttributeError):
            self._launcher = os.pidfd_open(pid)

    def mute(self) -> None:
        """Reports nothing from now on, because `kdist run` itself ends the job."""
        self._is_reported = True

    def close(self) -> None:
        """Handles all ranks that have exited so far, then releases everything."""
        self._wake.close()
        if self._thread.is_alive():
            self._thread.join(2 * _TIMEOUT)
        for each in (self._listener, self._woken):
            each.close()
        if self._launcher is not None:
            os.close(self._launcher)
            self._launcher = None

    def _run(self) -> None:
        try:
            # epoll returns the exits in their order, however late this thread runs.
            while all(self._handle(descriptor) for descriptor, _ in self._poll.poll()):
                pass
        finally:
            for rank in self._ranks.values():
                rank.close()

    def _handle(self, descriptor: int) -> bool:
        """Handles an event; returns `False` if it was the call to `close`."""
        if descriptor == self._woken.fileno():
            return False
        if descriptor == self._listener.fileno():
            self._accept()
        else:
            self._poll.unregister(descriptor)
            self._handle_exit(self._ranks.pop(descriptor))
            os.close(descriptor)
        return True

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        rank = _Rank(connection, [])
        try:
            connection.settimeout(_TIMEOUT)
            text, rank.files, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 3)
            connection.setblocking(False)
            registration = json.loads(text)
            rank.name, rank.pid = registration["name"], registration["pid"]
            exited = os.pidfd_open(rank.pid)
            self._ranks[exited] = rank
            self._poll.register(exited, select.EPOLLIN)
        except (OSError, AttributeError, ValueError, LookupError, TypeError):
            rank.close()  # a kernel before 5.3, or not a rank: Hydra must not wait for its descriptors

    def _handle_exit(self, rank: _Rank) -> None:
        code = rank.exit_code()
        for each in (rank, *self._ranks.values()):
            each.receive()
            if each.message.isdigit() and not self._is_reported:
                self._is_reported, self.code = True, int(each.message)
        if not self._is_reported and rank.message != _SUCCESS:
            if code in (None, -signal.SIGKILL) and self._exited_with_0 is None and self._launcher_exits():
                self.mute()
            elif code == 0:
                # It may be a success. If it had initialised MPI, Hydra kills the others and reports success.
                self._exited_with_0 = self._exited_with_0 or rank
            elif self._exited_with_0 is not None and code == -signal.SIGKILL:
                self._report(self._exited_with_0, "exited with code 0", 1)
            elif code is None:
                self._report(rank, "died", None)
            else:
                how = killed_by(-code) if code < 0 else f"exited with code {code}"
                self._report(rank, how, 128 - code if code < 0 else code, Kind.SIGNAL if code < 0 else Kind.EXIT)
        rank.close()

    def _launcher_exits(self) -> bool:
        """Returns whether the launcher has exited or does so now: its files close first, which a proxy may notice.

        A launcher that kills ranks itself waits for their descriptors, which this process holds.
        """
        return self._launcher is not None and bool(select.select([self._launcher], [], [], _TIME_TO_EXIT)[0])

    def _report(self, rank: _Rank, how: str, code: int | None, kind: Kind = Kind.LOST) -> None:
        self._is_reported, self.code = True, code
        number, _, host = rank.name.partition(" of ")
        host = host.rpartition(" ")[2]
        append_failure(self._directory, Failure(kind, how, int(number), host, from_launcher=True))
        if code is not None and rank.files:
            time.sleep(OUTPUT_DELAY)
            with contextlib.suppress(OSError):
                os.write(rank.files[0], abort_command(code))
        for each in self._ranks.values():  # Hydra waits until their descriptors close
            each.close()


@dataclasses.dataclass(eq=False)
class _Rank:
    connection: socket.socket
    files: list[int]
    name: str = ""
    pid: int = 0
    message: bytes = b""

    def receive(self) -> None:
        """Receives the one message that it sends before it exits, if that has arrived."""
        with contextlib.suppress(OSError):
            self.message = self.message or self.connection.recv(_MAX_MESSAGE_BYTES)

    def exit_code(self) -> int | None:
        """Returns its exit code; minus the signal's number if one killed it; `None` if Hydra has reaped it."""
        deadline = time.monotonic() + _TIMEOUT
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
                if fields[0] in "ZX":
                    return os.waitstatus_to_exitcode(int(fields[-1]))
        return None

    def close(self) -> None:
        """Closes its connection and its descriptors."""
        self.connection.close()
        while self.files:
            os.close(self.files.pop())
