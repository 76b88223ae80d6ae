"""Runs a job as a child process, returns its exit code, and leaves no process of it behind."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from kdist.errors import LaunchError
from kdist.launchers.command import Command
from kdist.launchers.start import module_command
from kdist.restarts.event_lines import Filter

_LOG = logging.getLogger("kdist")

_GUARD = "kdist.launchers.guard"  # which imports this module
_STDIN = 0
_GRACE = 10.0  # seconds that the launcher has to end its ranks before SIGKILL
_GRACE_OF_RANKS = 2.0  # seconds that ranks have to exit after their launcher


def run(
    command: Command,
    on_signal: Callable[[], object] | None = None,
    must_end: Callable[[], bool] | None = None,
    stderr: Filter | None = None,
    stdout: Filter | None = None,
) -> int:
    """Runs a job until it exits: `started` and `Job.follow`.

    Args:
        command: `Command`, which starts the job.
        on_signal: as for `Job.follow`.
        must_end: as for `Job.follow`.
        stderr: as for `started`.
        stdout: as for `started`.

    Returns:
        The exit code.
    """
    with received_signals() as received, started(command, stderr, stdout) as job:
        code = job.follow(received, on_signal, must_end)
        if received:
            _LOG.warning("%s: the job has ended", signal.Signals(received[0]).name)
        return code


@contextlib.contextmanager
def started(
    command: Command, stderr: Filter | None = None, stdout: Filter | None = None, *, reads_input: bool = True
) -> Iterator[Job]:
    """Starts a job, yields it, and leaves no process of it behind.

    It inherits the standard streams.

    Args:
        command: `Command`, which starts the job.
        stderr: `Filter` or `None`, through which the launcher's standard error passes.
        stdout: the same of its standard output.
        reads_input: bool, whether it inherits standard input, too.

    Raises:
        LaunchError: if the launcher cannot be started.
    """
    with guard() as guard_session, _terminal_set_back() if reads_input else contextlib.nullcontext():
        try:
            # In a session of its own: Ctrl-C in a terminal reaches only this process, and all ranks can be found.
            process = subprocess.Popen(
                command.argv,
                env={**os.environ, **command.env},
                stdin=None if reads_input else subprocess.DEVNULL,
                stdout=None if stdout is None else subprocess.PIPE,
                stderr=None if stderr is None else subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as err:
            raise LaunchError(
                f"The launcher cannot be started. Received: {err} from `{command}`. Expected a program that runs. "
                "Fix: check that it is installed and executable; `kdist env` shows which one is used."
            ) from err
        job = Job(process, stderr, stdout)
        try:
            guard_session(process.pid)
            yield job
        finally:
            job.end()


@contextlib.contextmanager
def _terminal_set_back() -> Iterator[None]:
    """Sets the terminal back in the end: a job that is ended at a prompt leaves it without an echo."""
    try:
        settings = termios.tcgetattr(_STDIN)
    except termios.error:  # it is none
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(termios.error, OSError):
            if os.tcgetpgrp(_STDIN) == os.getpgrp():  # the system stops a process of the background that does it
                termios.tcsetattr(_STDIN, termios.TCSANOW, settings)


class Job:
    """A job whose launcher was started.

    Args:
        process: `subprocess.Popen`, the launcher.
        stderr: `Filter` or `None`, through which its standard error passes.
        stdout: the same of its standard output.
    """

    def __init__(self, process: subprocess.Popen[bytes], stderr: Filter | None, stdout: Filter | None = None) -> None:
        self._process = process
        self._has_ended = False
        streams = [(process.stdout, 1, stdout), (process.stderr, 2, stderr)]
        filtered = [each for each in streams if each[2] is not None]
        self._readers = [
            threading.Thread(target=_copy, args=each, name="kdist-output", daemon=True) for each in filtered
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        return self._process.pid

    @property
    def signal(self) -> int:
        """The number of the signal that ended the launcher; 0 if none did, or it runs."""
        return max(0, -(self._process.poll() or 0))

    @property
    def is_running(self) -> bool:
        """Whether the launcher is."""
        return self._process.poll() is None

    def follow(
        self,
        received: Sequence[int],
        on_signal: Callable[[], object] | None = None,
        must_end: Callable[[], bool] | None = None,
    ) -> int:
        """Waits until the job exits, and ends it when it must.

        Ctrl-C, SIGTERM and SIGHUP end all ranks, unless this process was started to ignore them, as by `nohup`.

        Args:
            received: what `received_signals` yields.
            on_signal: function that is called first when a signal ends the job, or `None`.
            must_end: function that is called every half second and returns whether the job cannot go on, or `None`.

        Returns:
            The exit code: the launcher's own, or 128 plus a signal's number, as a shell reports it; 1 after `must_end`.
        """
        ends = False
        while self.is_running and not received and not ends:
            _wait(self._process, 0.5)
            ends = must_end is not None and self.is_running and must_end()
        has_ended = not self.is_running
        if received and on_signal is not None:
            on_signal()
        code = self.end()
        if received and not (has_ended and code == 0):  # what comes after a job that ended well changes nothing
            return 128 + received[0]
        if ends:
            return 1
        return 128 - code if code < 0 else code

    def end(self) -> int:
        """Ends all its processes that still run, and returns the launcher's exit code."""
        if not self._has_ended:
            self._has_ended = True
            end_session(self._process.pid)
            self._process.wait()
            for reader in self._readers:
                reader.join(_GRACE_OF_RANKS)  # a process that outlives the job may hold the pipe
        return self._process.returncode


def _copy(reading: IO[bytes], target: int, through: Filter) -> None:
    """Copies the launcher's output to that of this process through a filter, and closes it."""
    with reading:
        while piece := os.read(reading.fileno(), 1 << 16):
            _write(target, through.feed(piece))
    _write(target, through.finish())


def _write(target: int, piece: bytes) -> None:
    with contextlib.suppress(OSError):  # a closed terminal must not stop the ranks
        while piece:
            piece = piece[os.write(target, piece) :]


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that end a job: SIGINT, SIGTERM and SIGHUP, unless this process was started ignoring them."""
    usual = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in usual if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def guard() -> Iterator[Callable[[int], None]]:
    """Yields a function that makes a guard process end a session if this process is killed, as by SIGKILL.

    Yields:
        A function of the process id of the session's leader.
    """
    process = subprocess.Popen(
        [*module_command(sys.executable, _GUARD)], stdin=subprocess.PIPE, start_new_session=True, text=True
    )
    try:
        yield functools.partial(_send_leader, process)
    finally:
        process.communicate("ended\n")


def _send_leader(process: subprocess.Popen[str], leader: int) -> None:
    if process.stdin is not None:
        process.stdin.write(f"{leader}\n")
        process.stdin.flush()


def end_session(leader: int) -> None:
    """Ends all processes of a job: SIGTERM to the launcher, then SIGKILL to those that are left.

    Args:
        leader: int, the launcher's process id, which is the job's session id.
    """
    if leader in _session(leader):
        # Not SIGINT: Hydra only forwards it, and a rank inside of MPI does not react.
        os.kill(leader, signal.SIGTERM)
        _wait_until(lambda: leader not in _session(leader), _GRACE)
    if leader not in _session(leader):
        _wait_until(lambda: not _session(leader), _GRACE_OF_RANKS)
    for pid in _session(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _wait_until(lambda: not _session(leader), _GRACE_OF_RANKS)


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _session(leader: int) -> list[int]:
    """Returns the ids of the running processes of a session."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError):
            pid = int(name)
            with open(f"/proc/{pid}/stat") as file:
                state, _, _, session = file.read().rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in "ZX":
                found.append(pid)
    return found


@contextlib.contextmanager
def received_signals() -> Iterator[list[int]]:
    """Yields a list of the signals that end a job, as they come. Python allows it in the main thread only."""
    with _received(stop_signals()) as received:
        yield received


@contextlib.contextmanager
def received_notices() -> Iterator[list[int]]:
    """Yields a list of SIGUSR1 as it comes, by which schedulers announce that a job will end."""
    with _received([signal.SIGUSR1]) as received:
        yield received


@contextlib.contextmanager
def _received(signals: Sequence[signal.Signals]) -> Iterator[list[int]]:
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    previous = {each: signal.signal(each, lambda number, _: received.append(number)) for each in signals}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
