"""Locks in files: of a file, which processes of one host wait for, and of a directory, for one training at a time."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from kdist.errors import CheckpointError

logger = logging.getLogger("kdist")

NAME = ".in-use"
PATIENCE = 30.0  # seconds: the end of a job may overlap with its restart


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock, which other processes wait for; the end of a process releases it.

    Where files cannot be made or locked, as on some network file systems, nothing is locked.

    Args:
        path: path of a file in a directory that is there; the file is made and deleted.
    """
    descriptor = _lock(path)
    try:
        yield
    finally:
        if descriptor is not None:
            _unlock(path, descriptor)


class DirectoryLock:
    """An exclusive lock of a directory, released at the end of the process.

    One process may acquire it several times: a `fit` that raised does not block the next. File systems without locks,
    as some network file systems, are not locked.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._descriptor: int | None = None

    def acquire(self, patience: float = PATIENCE, job: str = "") -> None:
        """Waits until no other process has the lock.

        A file server may keep the lock of a host that was lost: from an earlier attempt of the same job it is taken
        over after the patience.

        Args:
            patience: float, the seconds to wait at most.
            job: str, the name of the job that this process belongs to; empty if nothing starts it again.

        Raises:
            CheckpointError: if another training has the lock.
        """
        mark = f", in job {job}" if job else ""
        deadline = time.monotonic() + patience
        is_logged = False
        while (owner := self._try(mark)) is not None:
            if time.monotonic() > deadline:
                if mark and owner.endswith(mark):
                    logger.warning("the lock of %s is taken over from an earlier attempt, %s", self._path.parent, owner)
                    self._path.unlink(missing_ok=True)
                    continue
                raise CheckpointError(
                    f"Two trainings use one backup_dir. Received: {self._path.parent}, which {owner} has locked. "
                    "Expected a directory for this training only. Fix: use another backup_dir, or end that training."
                )
            if not is_logged:
                logger.warning("%s is locked by %s: waiting until it is free", self._path.parent, owner)
            is_logged = True
            time.sleep(0.2)

    def release(self) -> None:
        """Releases the lock, if it was acquired."""
        if self._descriptor is not None:
            _unlock(self._path, self._descriptor)
            self._descriptor = None

    def _try(self, mark: str) -> str | None:
        """Acquires the lock if it is free, and writes who has it, with a mark at the end; else returns its owner."""
        with contextlib.suppress(OSError):  # writing will raise the same error
            self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = _lock(self._path, waits=False)
        except BlockingIOError as error:
            return str(error) or "another process"
        if descriptor is not None:
            self._descriptor = descriptor
            with contextlib.suppress(OSError):  # a full disk
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on host {socket.gethostname()}{mark}".encode())
        return None


def _lock(path: Path, *, waits: bool = True) -> int | None:
    """Returns a file that is open and locked; `None` where files cannot be made or locked.

    Raises:
        BlockingIOError: with what is in the file, if another process has the lock and this one does not wait.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_taken = not waits and isinstance(error, (BlockingIOError, PermissionError))
            owner = os.read(descriptor, 1000) if is_taken else b""
            os.close(descriptor)
            if is_taken:
                raise BlockingIOError(owner.decode(errors="replace")) from error
            return None
        # A lock's file is deleted when it is released: another process may have made a new one meanwhile.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


def _unlock(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    os.close(descriptor)
