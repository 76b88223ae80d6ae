"""Where a rank's output goes: rank 0 is shown, the others are kept in files or dropped."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tty
from typing import NoReturn, TextIO

_STREAMS = ((1, "out"), (2, "err"))


def redirect(rank: int, directory: str | None) -> TextIO | None:
    """Points this process's standard streams to where `kdist run` wants them.

    Without a directory, rank 0 is left alone, and of the other ranks only stderr is shown. With one, every rank's
    streams are kept in `rank0.out`, `rank0.err` and so on, and only rank 0's are shown too. File descriptors
    are redirected, so that what TensorFlow's own C++ code prints goes the same way.

    Args:
        rank: int, this process's number.
        directory: str or `None`, where files are kept; it is made.

    Returns:
        The stream to the terminal where stderr was held back, or `None`.
    """
    terminal = None
    if directory is not None:
        os.makedirs(directory, exist_ok=True)
        if rank > 0:
            terminal = os.fdopen(os.dup(2), "w")
        for descriptor, suffix in _STREAMS:
            file = os.open(
                os.path.join(directory, f"rank{rank}.{suffix}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666
            )
            if rank == 0:
                _tee(descriptor, file)
            else:
                os.dup2(file, descriptor)
            os.close(file)
        if terminal is not None:
            # A crash in C++ leaves its own words in the file; where it was in Python is shown.
            faulthandler.enable(terminal)
    elif rank > 0:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    for stream in (sys.stdout, sys.stderr):
        # What a rank printed must be there when the rank is killed.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return terminal


def _tee(descriptor: int, file: int) -> None:
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
            _copy(reading, descriptor, file)
        os._exit(0)
    os.waitpid(child, 0)
    os.dup2(writing, descriptor)
    os.close(writing)
    os.close(reading)


def _copy(reading: int, shown: int, kept: int) -> NoReturn:
    """Copies until nobody is left who could write."""
    try:
        os.setpgid(0, 0)  # the launcher's signals to the rank's group must not cut off its last words
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for target, source in enumerate([os.dup(reading), os.dup(shown), os.dup(kept)]):
            os.dup2(source, target)
        # Above all the launcher's sockets, whose end is how it learns that a rank died.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        while piece := os.read(0, 1 << 16):
            for target in (1, 2):
                with contextlib.suppress(OSError):
                    _write(target, piece)
    except OSError:
        pass  # a pseudo-terminal ends by an error
    finally:
        os._exit(0)


def _write(target: int, piece: bytes) -> None:
    while piece:
        piece = piece[os.write(target, piece) :]
