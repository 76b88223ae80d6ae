"""Redirection of a rank's output: rank 0 is shown, the others go to files and are shown when they fail."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import time
import tty
from typing import NoReturn

REPORT_PREFIX = "[kdist] rank "
"""The beginning of a failing rank's report."""

SAID = "kdist: "
"""The beginning of a line of `kdist run` itself."""

BEGINS_LINE = "\n"
"""What comes before a text at the end of a job: rank 0 may have left a line without an end, such as a progress bar."""

# What makes a buffered stderr be shown: kdist's reports, and those of Python's faulthandler.
_FAILURE_MARKS = (REPORT_PREFIX.encode(), b"Fatal Python error: ")
# What TensorFlow's C++ code writes below its errors: the CPU, the GPUs that there are not, the end of a dataset.
_STARTUP_LINE = re.compile(
    rb"^(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: I .*|\t \[\[\{\{node IteratorGetNext\}\}\]\]|"
    rb"WARNING: All log messages before absl::InitializeLog.*|I\d{4} \d\d:\d\d:\d\d.* \S+\.cc:\d+\].*|"
    rb"W\d{4} \d\d:\d\d:\d\d.* local_rendezvous\.cc:\d+\].*|"
    rb"[IWE]0{4} 00:00:\d+\.\d+ .*(?:cudart|cuda_platform|cpu_feature_guard|cuInit|gpu_device).*|"
    rb"To enable the following instructions:.*rebuild TensorFlow.*)\n",
    re.MULTILINE,
)
_BUFFER_BYTES = 1 << 18  # of stderr that are kept until a failure
_STDOUT, _STDERR = 1, 2


def redirect(rank: int, directory: str | None, *, tee: bool = False, is_shown: bool = False) -> None:
    """Redirects this process's standard output and standard error for `kdist run`.

    Those of rank 0 are shown. Of the others only the stderr of a rank that fails is shown. With a directory, all are
    written to `rank0.out`, `rank0.err` and so on. File descriptors are redirected, so that the output of TensorFlow's
    C++ code is included.

    Args:
        rank: int, this process's number.
        directory: str or `None`, the directory of the files, which is created.
        tee: bool, whether the output of all ranks is shown, each line with the rank and the time.
        is_shown: bool, whether it is shown as that of rank 0 is, from now on: rank 0 is gone.
    """
    is_first = rank == 0 or is_shown
    if directory is not None:
        os.makedirs(directory, exist_ok=True)
    for descriptor, suffix in ((_STDOUT, "out"), (_STDERR, "err")):
        path = os.devnull if directory is None else os.path.join(directory, f"rank{rank}.{suffix}")
        if is_first and directory is None and not tee:
            continue
        file = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if is_shown else os.O_TRUNC), 0o666)
        if tee:
            _tee(descriptor, file, is_first=is_first, label=f"rank {rank}")
        elif not is_first and descriptor == _STDOUT:
            os.dup2(file, descriptor)
        else:
            _tee(descriptor, file, is_first=is_first)
        os.close(file)
    # A crash in C++ then prints the Python stack, which is one of the marks of a failure.
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        # Printed lines must not be lost when the rank is killed.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


class Shown:
    """The standard output and error as they are before `redirect`, to show this rank's output from some moment on."""

    def __init__(self) -> None:
        self._descriptors = os.dup(_STDOUT), os.dup(_STDERR)

    def show(self, rank: int, directory: str | None) -> None:
        """Shows the output of this process from now on, as that of rank 0 is.

        Args:
            rank: int, the number in the names of its files.
            directory: str or `None`, the directory of the files.
        """
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for kept, descriptor in zip(self._descriptors, (_STDOUT, _STDERR), strict=True):
            os.dup2(kept, descriptor)
        redirect(rank, directory, is_shown=True)


def _tee(descriptor: int, file: int, *, is_first: bool, label: str = "") -> None:
    """Starts a small process that copies the output of the descriptor to its former target and to the file.

    A process, not a thread: it still copies what a rank writes before it crashes. A terminal stays one for the script,
    so that progress bars look the same; not where each line gets a label.
    """
    if os.isatty(descriptor) and not label:
        reading, writing = os.openpty()
        tty.setraw(writing)
    else:
        reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # A grandchild, so that a script which waits for its children does not wait for this one.
        if os.fork() == 0:
            _copy(reading, descriptor, file, is_first, label)
        os._exit(0)
    os.waitpid(child, 0)
    os.dup2(writing, descriptor)
    os.close(writing)
    os.close(reading)


def _close_others() -> None:
    """Closes all files but the first three: one by one where there may be millions of them, which takes minutes."""
    try:
        opened = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        return
    for each in opened:
        if each > 2:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(each)


def _copy(reading: int, shown: int, file: int, is_first: bool, label: str) -> NoReturn:
    """Copies until all writers have closed.

    Of other ranks than the first, what TensorFlow says on every rank is not shown, and without a label nothing is until
    a failure.
    """
    until_failure = not is_first
    try:
        os.setpgid(0, 0)  # a signal of the launcher to the rank's process group must not end the copy
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for target, source in enumerate([os.dup(reading), os.dup(shown), os.dup(file)]):
            os.dup2(source, target)
        # The launcher detects the death of a rank when its sockets close.
        _close_others()
        buffer = rest = b""
        while piece := os.read(0, 1 << 16):
            _write(2, piece)
            if label:
                lines, end, rest = (rest + piece).rpartition(b"\n")
                lines = lines + end if is_first else without_startup_lines(lines + end)
                _write(1, labelled(lines[:-1], label) if lines else b"")
                continue
            if until_failure:
                buffer = (buffer + piece)[-_BUFFER_BYTES:]
                if not any(mark in buffer for mark in _FAILURE_MARKS):
                    continue
                until_failure, piece = False, without_startup_lines(buffer)
            _write(1, piece)
        _write(1, labelled(rest, label) if rest else b"")
    except OSError:
        pass  # a pseudo-terminal is closed
    finally:
        os._exit(0)


def without_startup_lines(text: bytes) -> bytes:
    """Returns what a rank has written without what TensorFlow says on every rank: rank 0 has shown it.

    Args:
        text: bytes.
    """
    return _STARTUP_LINE.sub(b"", text)


def labelled(lines: bytes, label: str) -> bytes:
    """Returns lines of output, each with a label and the time before it; of a progress bar what it shows last.

    Args:
        lines: bytes, one line or more.
        label: str, the rank.
    """
    begin = f"[{label} {time.strftime('%H:%M:%S')}] ".encode()
    return b"".join(begin + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in lines.split(b"\n"))


def _write(target: int, piece: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk or a closed terminal must not stop the rank
        while piece:
            piece = piece[os.write(target, piece) :]
