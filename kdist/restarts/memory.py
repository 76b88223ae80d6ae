"""The directory of a job in the memory of a host, which outlives its attempts."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

MEMORY = Path("/dev/shm")
"""The memory file system of Linux."""

_PREFIX = "kdist-copies-"
_OLD = 24 * 3600.0  # seconds without a copy, after which a job is over


def directory_of(job: str) -> Path:
    """Returns the directory of a job's copies of checkpoints on this host.

    Args:
        job: str, what distinguishes it, with all its attempts, from others.
    """
    return MEMORY / f"{_PREFIX}{job}"


def delete_old(besides: str) -> None:
    """Deletes the copies of this user's jobs that ended on this host without doing so.

    Args:
        besides: str, a job whose copies are left.
    """
    for directory in set(MEMORY.glob(f"{_PREFIX}*")) - {directory_of(besides)}:
        with contextlib.suppress(OSError):
            times = [each.stat().st_mtime for each in (directory, *directory.iterdir())]
            if directory.stat().st_uid == os.getuid() and max(times) < time.time() - _OLD:
                shutil.rmtree(directory)
