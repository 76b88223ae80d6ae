"""Where a rank's output goes: rank 0 is shown, the others are kept in files, and shown when they fail."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tty
from typing import NoReturn

REPORT = "[kdist] rank "
"""How the report of a failing rank begins."""

# What a held-back stderr is shown for: kdist's own reports, and those of Python's faulthandler.
_FAILED = (REPORT.encode(), b"Fatal Python error: ")
_HELD = 1 << 18  # bytes of a held-back stderr that are remembered
_STDOUT, _STDERR = 1, 2


def redirect(rank: int, directory: str | None) -> None:
    """Points this process's standard streams to where `kdist run` wants them.

    Rank 0's are shown. The others' are not, but for what a rank that fails has written to stderr. With a
    directory, every rank's are kept in `rank0.out`, `rank0.err` and so on. File descriptors are redirected, so
    that what TensorFlow's own C++ code prints goes the same way.

    Args:
        rank: int, this process's number.
        directory: str or `None`, where files are kept; it is made.
    """
    if directory is not None:
        os.makedirs(directory, exist_ok=True)
    for descriptor, suffix in ((_STDOUT, "out"), (_STDERR, "err")):
        path = os.devnull if directory is None else os.path.join(directory, f"rank{rank}.{suffix}")
        if rank == 0 and directory is None:
            continue
        kept = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        if rank > 0 and descriptor == _STDOUT:
            os.dup2(kept, descriptor)
        else:
            _tee(descriptor, kept, hold=rank > 0)
        os.close(kept)
    # A crash in C++ then says where it was in Python too, and is recognised as one.
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        # What a rank printed must be there when the rank is killed.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _tee(descriptor: int, kept: int, *, hold: bool) -> None:
    """Lets a small process copy what is written to the descriptor to where it went before, and to the file.

    A process, not a thread: it still copies the last words of a rank that crashes. What was a terminal stays
    one, so that progress bars look as they would.
    """
    if os.isatty(descriptor):
        reading, writing = os.openpty()
        tty.setraw(writing)
    else:
        reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # A grandchild, so that a script which waits for its children does not meet this one.
        if os.fork() == 0:
            _copy(reading, descriptor, kept, hold)
        os._exit(0)
    os.waitpid(child, 0)
    os.dup2(writing, descriptor)
    os.close(writing)
    os.close(reading)


def _copy(reading: int, shown: int, kept: int, hold: bool) -> NoReturn:
    """Copies until nobody is left who could write; if told to hold, shows nothing before a failure."""
    try:
        os.setpgid(0, 0)  # the launcher's signals to the rank's group must not cut off its last words
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for target, source in enumerate([os.dup(reading), os.dup(shown), os.dup(kept)]):
            os.dup2(source, target)
        # Above all the launcher's sockets, whose end is how it learns that a rank died.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        held = b""
        while piece := os.read(0, 1 << 16):
            _write(2, piece)
            if hold:
                held = (held + piece)[-_HELD:]
                if not any(mark in held for mark in _FAILED):
                    continue
                hold, piece = False, held
            _write(1, piece)
    except OSError:
        pass  # a pseudo-terminal ends by an error
    finally:
        os._exit(0)


def _write(target: int, piece: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk or a closed terminal must not stop the rank
        while piece:
            piece = piece[os.write(target, piece) :]
