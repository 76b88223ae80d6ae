"""Who names a rank that has died without a word, where the launcher at once ends the ranks that could.

Hydra, the mpirun of MPICH and Intel MPI, names a process id, or nothing at all. So each rank introduces itself to
`kdist run`, which sees who dies first.
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
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from kdist.launch.failure import LAST_WORDS
from kdist.launch.output import REPORT

_NAME = "witness"  # of the socket in the job's directory
_LONGEST = 1 << 12  # bytes of an introduction
_ENDS_WELL = b"ends well"
_PATIENCE = 1.0  # seconds that the kernel may take to make a process's exit code known


def is_needed(env: Mapping[str, str]) -> bool:
    """Returns whether the launcher is Hydra.

    Args:
        env: mapping of variable name to value.
    """
    return "PMI_FD" in env


def abort_line(code: int) -> bytes:
    """Returns what makes Hydra end the job, a line of the protocol that it speaks with its processes.

    Args:
        code: int, the exit code, from 1 to 255.

    References:
        - https://github.com/pmodels/mpich/blob/main/doc/wiki/developer_docs/PMI_v1_Wire_Protocol.md
    """
    return f"cmd=abort exitcode={code}\n".encode()


class Introduction:
    """A rank's line to `kdist run`; without one there, nothing.

    Hydra learns of a death by the end of a rank's output and of its connection. Of those that it kills then it may meet
    one before the rank that died, and end with that one's exit code; and where a rank was not in MPI yet, it takes any
    code for a good end. So `kdist run` is given all three, to keep them until it has told Hydra.

    Args:
        directory: str, the job's.
        rank: int, this process's number.
        size: int, the number of processes, all on this host.
        env: mapping of variable name to value, for which `is_needed`.
    """

    def __init__(self, directory: str, rank: int, size: int, env: Mapping[str, str]) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        text = json.dumps({"name": f"{rank} of {size} on host {platform.node()}", "pid": os.getpid()}).encode()
        with contextlib.suppress(OSError, ValueError):
            self._connection.connect(str(Path(directory, _NAME)))
            socket.send_fds(self._connection, [text], [int(env["PMI_FD"]), 1, 2])

    def ends_well(self) -> None:
        """Says that this process ends, and nothing is wrong."""
        self._say(_ENDS_WELL)
        self._connection.close()

    def has_said_why(self, code: int) -> None:
        """Says that it has been said why the job ends: who dies from now on dies of that.

        Args:
            code: int, the exit code that the job is to have.
        """
        self._say(str(code).encode())

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(word)


class Witness:
    """Listens to the ranks of a job on this host, in a thread of its own, and names the first to die without a word.

    Args:
        directory: str, the job's.

    Attributes:
        code: int or `None`, the exit code that the job is to have, where it is known.
    """

    def __init__(self, directory: str) -> None:
        self.code: int | None = None
        self._is_explained = False
        self._has_left: _Rank | None = None
        self._ranks: dict[int, _Rank] = {}  # by the descriptor that is readable once it has ended
        self._listener = socket.socket(socket.AF_UNIX)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kdist-witness", daemon=True)
        with contextlib.suppress(OSError, AttributeError):  # a name that is too long; a system that is not Linux
            self._poll = select.epoll()
            self._listener.bind(str(Path(directory, _NAME)))
            self._listener.listen()
            for each in (self._listener, self._woken):
                self._poll.register(each, select.EPOLLIN)
            self._thread.start()

    def dismiss(self) -> None:
        """Makes it say nothing more: the job is ended from here."""
        self._is_explained = True

    def finish(self) -> None:
        """Returns once it has seen to all who have ended so far; nothing of it is left."""
        self._wake.close()
        if self._thread.is_alive():
            self._thread.join(2 * _PATIENCE)
        for each in (self._listener, self._woken):
            each.close()

    def _run(self) -> None:
        try:
            # The kernel tells in which order they ended, however late this thread asks.
            while all(self._sees_to(descriptor) for descriptor, _ in self._poll.poll()):
                pass
        finally:
            for rank in self._ranks.values():
                rank.let_go()

    def _sees_to(self, descriptor: int) -> bool:
        """Returns whether there may be more to come."""
        if descriptor == self._woken.fileno():
            return False
        if descriptor == self._listener.fileno():
            self._accept()
        else:
            self._poll.unregister(descriptor)
            self._has_ended(self._ranks.pop(descriptor))
            os.close(descriptor)
        return True

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        rank = _Rank(connection, [])
        try:
            connection.settimeout(_PATIENCE)
            text, rank.files, _, _ = socket.recv_fds(connection, _LONGEST, 3)
            connection.setblocking(False)
            said = json.loads(text)
            rank.name, rank.pid = said["name"], said["pid"]
            ended = os.pidfd_open(rank.pid)
            self._ranks[ended] = rank
            self._poll.register(ended, select.EPOLLIN)
        except (OSError, AttributeError, ValueError, LookupError, TypeError):
            rank.let_go()  # a kernel before 5.3, or no rank: Hydra must not wait for what is kept

    def _has_ended(self, rank: _Rank) -> None:
        code = rank.exit_code()
        for each in (rank, *self._ranks.values()):
            each.listen()
            if each.said.isdigit() and not self._is_explained:
                self._is_explained, self.code = True, int(each.said)
        if not self._is_explained and rank.said != _ENDS_WELL:
            if code == 0:
                # All may be well with it. If it was in MPI, Hydra now kills the others, and calls that a good end.
                self._has_left = self._has_left or rank
            elif self._has_left is not None and code == -signal.SIGKILL:
                self._explain(self._has_left, "ended with code 0", 1)
            elif code is None:
                self._explain(rank, "has died", None)
            else:
                how = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
                self._explain(rank, how, 128 - code if code < 0 else code)
        rank.let_go()

    def _explain(self, rank: _Rank, how: str, code: int | None) -> None:
        self._is_explained, self.code = True, code
        with contextlib.suppress(OSError, ValueError):  # nobody listens
            sys.stderr.write(
                f"{REPORT}{rank.name} {how}, without a word. Fix: look at its output and at the host's log; the kernel "
                "kills what needs more memory than there is.\n"
            )
        if code is not None and rank.files:
            time.sleep(LAST_WORDS)
            with contextlib.suppress(OSError):
                os.write(rank.files[0], abort_line(code))
        for each in self._ranks.values():  # Hydra waits for the end of what is kept
            each.let_go()


@dataclasses.dataclass(eq=False)
class _Rank:
    connection: socket.socket
    files: list[int]
    name: str = ""
    pid: int = 0
    said: bytes = b""

    def listen(self) -> None:
        """Takes what it has said, at most one word."""
        with contextlib.suppress(OSError):  # nothing new
            self.said = self.said or self.connection.recv(_LONGEST)

    def exit_code(self) -> int | None:
        """Returns its exit code, or less than 0, the signal that ended it; `None` if Hydra has taken it already."""
        deadline = time.monotonic() + _PATIENCE
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
                if fields[0] in "ZX":
                    return os.waitstatus_to_exitcode(int(fields[-1]))
        return None

    def let_go(self) -> None:
        """Keeps nothing of it any more."""
        self.connection.close()
        while self.files:
            os.close(self.files.pop())
