"""A job as a child process: its exit code is passed on, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from kdist.errors import LaunchError
from kdist.launch.command import Command

_LOG = logging.getLogger("kdist")

_GRACE = 10.0  # seconds that a launcher has to end its ranks before they are killed
_REMAINDER = 2.0  # seconds that processes have to end by themselves after their launcher


def run(command: Command, on_signal: Callable[[], object] | None = None) -> int:
    """Runs a job to its end.

    The standard streams are this process's own. Ctrl-C, SIGTERM and SIGHUP end all ranks, unless whoever started this
    process has it ignore them: `nohup` does.

    Args:
        command: `Command`, what starts the job.
        on_signal: function to call when a signal ends the job, before anything else is done, or `None`.

    Returns:
        The exit code: the launcher's own, or 128 plus a signal's number, as a shell reports it.

    Raises:
        LaunchError: if the launcher cannot be started.
    """
    with _stop_signals() as received, _guard() as watch:
        try:
            # A session of its own: a terminal's Ctrl-C comes here alone, and what is left of the job can be found.
            process = subprocess.Popen(command.argv, env={**os.environ, **command.env}, start_new_session=True)
        except OSError as err:
            raise LaunchError(
                f"The launcher does not start. Received: {err} from `{command}`. Expected a program that runs. "
                "Fix: check that it is installed and executable; `kdist env` shows which one is used."
            ) from err
        try:
            watch(process.pid)
            while process.poll() is None and not received:
                _wait(process, 0.5)
            if received and on_signal is not None:
                on_signal()
        finally:
            end_session(process.pid)
            code = process.wait()
    if received:
        _LOG.warning("%s: the job is ended", signal.Signals(received[0]).name)
        return 128 + received[0]
    return 128 - code if code < 0 else code


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that end a job: those of the usual ones that this process was not started to ignore."""
    usual = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in usual if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def _guard() -> Iterator[Callable[[int], None]]:
    """Gives the function that has a process of its own end a job, should this one be killed: SIGKILL leaves no time."""
    guard = subprocess.Popen(
        [sys.executable, "-m", "kdist.launch.guard"], stdin=subprocess.PIPE, start_new_session=True, text=True
    )
    try:
        yield functools.partial(_tell, guard)
    finally:
        guard.communicate("ended\n")


def _tell(guard: subprocess.Popen[str], leader: int) -> None:
    if guard.stdin is not None:
        guard.stdin.write(f"{leader}\n")
        guard.stdin.flush()


def end_session(leader: int) -> None:
    """Ends what is left of a job, first by its launcher, then by force.

    Args:
        leader: int, the launcher's process id, which is that of the job's session.
    """
    if leader in _session(leader):
        # Not SIGINT, which Hydra only passes on to ranks that may be deep in MPI.
        os.kill(leader, signal.SIGTERM)
        _until(lambda: leader not in _session(leader), _GRACE)
    if leader not in _session(leader):
        _until(lambda: not _session(leader), _REMAINDER)
    for pid in _session(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _until(is_over: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_over() and time.monotonic() < deadline:
        time.sleep(0.05)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _session(leader: int) -> list[int]:
    """Returns the processes of a session that still run."""
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
def _stop_signals() -> Iterator[list[int]]:
    """Collects the signals that would end this program, where Python allows it: in the main thread."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    previous = {each: signal.signal(each, lambda number, _: received.append(number)) for each in stop_signals()}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
