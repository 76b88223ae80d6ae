"""A directory that one training may use at a time, as long as its process lives."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from kdist.errors import CheckpointError

logger = logging.getLogger("kdist")

NAME = ".in-use"
PATIENCE = 30.0  # seconds: a job that is started again may meet the end of the one before


class Claim:
    """The right to write into a directory, by a lock that ends with its process.

    In one process it may be taken several times: a training that was interrupted does not stand in the way of the
    next. Where locks are not to be had, as on some network file systems, nothing is claimed.

    Args:
        folder: path of the directory; made when it is claimed.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._descriptor: int | None = None

    def take(self, patience: float = PATIENCE) -> None:
        """Waits until nobody else has it.

        Args:
            patience: float, seconds to wait at most.

        Raises:
            CheckpointError: if another process keeps it.
        """
        deadline = time.monotonic() + patience
        said = False
        while (owner := self._try()) is not None:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"Two trainings would save into one directory. Received: {self._path.parent}, which {owner} uses. "
                    "Expected one that no other training uses. Fix: give another backup_dir, or end the other one."
                )
            if not said:
                logger.warning("%s is in use by %s: waiting for its end", self._path.parent, owner)
            said = True
            time.sleep(0.2)

    def release(self) -> None:
        """Gives it back; without effect if it was not taken."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = None

    def _try(self) -> str | None:
        """Takes it if nobody has it; else returns who has."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None  # what is wrong with the directory is said when something is written
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            return owner or "another process"
        except OSError:
            os.close(descriptor)
            return None
        if not self._is_still_there(descriptor):  # its owner has given it back in between
            os.close(descriptor)
            return "another process"
        self._descriptor = descriptor
        with contextlib.suppress(OSError):  # a full disk
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on host {socket.gethostname()}".encode())
        return None

    def _is_still_there(self, descriptor: int) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        return False
