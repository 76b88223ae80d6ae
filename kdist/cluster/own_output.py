"""What a process writes to its standard streams, until its launcher has read it."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import stat
import sys
import termios
import time

_TIMEOUT = 1.0  # seconds


def flush_output() -> None:
    """Flushes the standard streams, and waits until they are read, if they are pipes.

    MPICH's launcher drops the rest once it is told to abort the job. A reader that reads nothing is not waited for.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    end = time.monotonic() + _TIMEOUT
    for stream in (1, 2):
        with contextlib.suppress(OSError):  # closed
            unread = array.array("i", [0])
            while stat.S_ISFIFO(os.fstat(stream).st_mode) and time.monotonic() < end:
                fcntl.ioctl(stream, termios.FIONREAD, unread)
                if not unread[0]:
                    break
                time.sleep(0.001)
