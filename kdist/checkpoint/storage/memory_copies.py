"""Checkpoints in the memory of a host: files of its memory file system, which outlive the processes of the job."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kdist.checkpoint.storage.arrays import array_at, bytes_of, made_to_the_end
from kdist.checkpoint.storage.files import Checkpoint, split
from kdist.errors import CheckpointError
from kdist.restarts.memory import directory_of
from kdist.state.part import MODEL, State

logger = logging.getLogger("kdist")

_HEADER = struct.Struct("<QQ")  # the checkpoint's number, 0 while it is written, and where the arrays end
_NUM_FILES = 2


class MemoryCopies:
    """The copies of one training's checkpoints on this host.

    Two files are written in turns: a process that is killed while it writes leaves the other one.

    Args:
        job: str, what distinguishes this job, with all its attempts, from others.
        backup_dir: str, what distinguishes the training from others of the job.
    """

    def __init__(self, job: str, backup_dir: str) -> None:
        self._backup_dir = os.path.abspath(backup_dir)
        # By the host's name, too: containers of one machine may share its memory file system.
        what = f"{platform.node()}:{self._backup_dir}"
        digest = hashlib.blake2b(os.fsencode(what), digest_size=8).hexdigest()
        self._directory = directory_of(job)
        self._files = [self._directory / f"{digest}-{place}" for place in range(_NUM_FILES)]
        self._damaged: set[Path] = set()

    def write(self, checkpoint: Checkpoint, number: int, receivers: Sequence[int]) -> None:
        """Writes a checkpoint over the older one, array by array.

        Collective, if ranks have parts of some arrays: every rank must write or send these, in the same order.

        Args:
            checkpoint: `Checkpoint`.
            number: int, above 0, which is greater for later ones.
            receivers: sequence of ints, the ranks that write copies, this one among them.

        Raises:
            OSError: if there is no room; all arrays have been made then.
        """
        values, arrays = split(checkpoint)
        with made_to_the_end(arrays, receivers) as blocks:
            self._write(values, arrays, blocks, number)

    def _write(
        self, values: Mapping[str, State], arrays: Mapping[str, Any], blocks: Mapping[str, Iterator[Any]], number: int
    ) -> None:
        path = min(self._files, key=self._number)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        # Not truncated: pages that are there already are written twice as fast.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        described = []
        with open(descriptor, "r+b") as file:
            _write_header(file, 0, 0)
            for key, array in arrays.items():
                described.append([key, array.dtype.str, array.shape])
                for block in blocks.get(key, [array]):
                    file.write(bytes_of(block))
            end = file.tell()
            file.write(json.dumps({"values": values, "arrays": described, "backup_dir": self._backup_dir}).encode())
            file.truncate()
            _write_header(file, number, end)
            self._damaged.discard(path)

    def newest(self) -> int:
        """Returns the number of the newest complete checkpoint, 0 if there is none; warns of one that is damaged."""
        self._damaged = {path for path in self._files if _number(path) and _read(path) is None}
        return max(map(self._number, self._files))

    def read(self) -> Checkpoint:
        """Returns the newest complete checkpoint, if `newest` has found one."""
        found = _read(max(self._files, key=self._number))
        if found is None:
            raise CheckpointError(
                "A copy of a checkpoint has changed while it was read. Received: "
                f"{' and '.join(map(str, self._files))}. Expected files that nothing else writes to. Fix: end what "
                "writes to them, and start the training again."
            )
        return found[1]

    def delete(self) -> None:
        """Deletes the copies."""
        for path in self._files:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another training's are there
            self._directory.rmdir()

    def _number(self, path: Path) -> int:
        return 0 if path in self._damaged else _number(path)


def left_by(job: str) -> dict[str, Checkpoint]:
    """Returns the newest copy on this host of each training of a job, by its `backup_dir`.

    Args:
        job: str, what distinguishes it, with all its attempts, from others.
    """
    complete = sorted((path for path in directory_of(job).glob("*") if _number(path)), key=_number)
    return dict(filter(None, map(_read, complete)))


def _read(path: Path) -> tuple[str, Checkpoint] | None:
    """Returns the `backup_dir` and the checkpoint of a file; `None`, with a warning, if it is damaged."""
    try:
        with open(path, "rb") as file:
            _, end = _HEADER.unpack(file.read(_HEADER.size))
            file.seek(end)
            described = json.loads(file.read())
        place = _HEADER.size
        checkpoint: dict[str, State] = described["values"]
        for key, dtype, shape in described["arrays"]:
            part, _, name = key.partition("/")
            array = array_at(path, place, shape, np.dtype(dtype))
            checkpoint[part][name] = array if part == MODEL else np.asarray(array)
            place += np.dtype(dtype).itemsize * int(np.prod(shape))
        if place != end:
            raise ValueError(f"it has arrays of {place - _HEADER.size} bytes, and says {end - _HEADER.size}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("a copy of a checkpoint in memory, %s, cannot be read, and is left out: %s", path, error)
        return None
    return described["backup_dir"], checkpoint


def _write_header(file: BinaryIO, number: int, end: int) -> None:
    file.flush()
    file.seek(0)
    file.write(_HEADER.pack(number, end))
    file.flush()


def _number(path: Path) -> int:
    try:
        with open(path, "rb") as file:
            number: int = _HEADER.unpack(file.read(_HEADER.size))[0]
            return number
    except (OSError, struct.error):
        return 0
