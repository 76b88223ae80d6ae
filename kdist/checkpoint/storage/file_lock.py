"""A lock in a file, which processes of one host wait for."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock, which other processes wait for; the end of a process releases it.

    Where files cannot be made or locked, as on some network file systems, nothing is locked.

    Args:
        path: path of a file in a directory that is there; the file is made and deleted.
    """
    descriptor = _acquire(path)
    try:
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Returns whether an open file still has its name: a lock's file is deleted when it is released."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def _acquire(path: Path) -> int | None:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
        except OSError:
            os.close(descriptor)
            return None
        if is_at(descriptor, path):
            return descriptor
        os.close(descriptor)
