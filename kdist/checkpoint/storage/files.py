"""Checkpoints on disk: each is a directory that is renamed when it is complete. NumPy and JSON, no pickle."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdist.checkpoint.storage.arrays import open_arrays, write_arrays
from kdist.checkpoint.storage.locks import DirectoryLock
from kdist.errors import CheckpointError
from kdist.state.part import MODEL, DeferredArray, State

logger = logging.getLogger("kdist")

Checkpoint = Mapping[str, State]
"""The states of a training's parts, by name."""

FORMAT = 2
NUM_KEPT = 2
_NAME = re.compile(r"checkpoint-(\d{8,})")
_UNFINISHED, _BEING_DELETED = ".checkpoint-being-written", ".checkpoint-being-deleted"
_ARRAYS, _STATE = "arrays.npz", "state.json"


class CheckpointDirectory:
    """The newest checkpoints of one training.

    A checkpoint is written under a temporary name and renamed; the previous one is kept. Checkpoints that cannot be
    read are not deleted.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._readable: dict[Path, Any] = {}  # with the sizes and times of its files
        self._unreadable: set[Path] = set()
        self.lock = DirectoryLock(self.path)

    def write(self, checkpoint: Checkpoint) -> Path:
        """Writes a checkpoint, deletes all but the previous one, and returns the path.

        Collective, if ranks have parts of some arrays: the others must send them to rank 0, which writes.

        Raises:
            CheckpointError: if it cannot be written; earlier checkpoints are not changed then.
        """
        values, arrays = split(checkpoint)
        if objects := [name for name, array in arrays.items() if _has_objects(array)]:
            raise CheckpointError(
                f"Python objects are not saved, as reading them would run code. Received: arrays of objects "
                f"{objects}. Expected numbers. Fix: convert the arrays to numbers."
            )
        number = max((_number(each) for each in self._all()), default=0) + 1
        unfinished, target = self.path / _UNFINISHED, self.path / f"checkpoint-{number:08d}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            _write(unfinished, values, arrays)
            unfinished.rename(target)
            _sync(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                shutil.rmtree(unfinished)
            needed = sum(array.nbytes for array in arrays.values()) / 2**20
            raise CheckpointError(
                f"A checkpoint cannot be written. Received: {error}. Expected to write {target}, with space for "
                f"{needed:.1f} MiB beside the previous checkpoint, which is unchanged. Fix: free some, or give another "
                "backup_dir."
            ) from error
        self._readable[target] = _files_of(target)
        self._prune()
        return target

    def read(self) -> tuple[Path, Checkpoint] | None:
        """Returns the newest readable checkpoint and its directory; `None` if there is no checkpoint.

        Raises:
            CheckpointError: if there are checkpoints and none can be read.
        """
        reasons = []
        for path in reversed(self._all()):
            try:
                found = _read(path)
            except (OSError, ValueError, KeyError) as error:  # incomplete, damaged, or of another format
                self._unreadable.add(path)
                reasons.append(f"{path.name}: {error}")
                continue
            self._readable[path] = _files_of(path)
            if reasons:
                logger.warning(
                    "%s cannot be read (%s); it is not deleted. Training resumes from the previous checkpoint, %s.",
                    self.path / reasons[0].partition(":")[0], "; ".join(reasons), path.name,
                )  # fmt: skip
            return path, found
        if reasons:
            raise CheckpointError(
                f"No checkpoint can be read. Received: {self.path} with {'; '.join(reasons)}. Expected a complete "
                "one. Fix: move the directory away to train from the beginning, or give another backup_dir."
            )
        return None

    def delete(self) -> None:
        """Deletes the readable checkpoints, and the directory if it is empty then."""
        shutil.rmtree(self.path / _UNFINISHED, ignore_errors=True)
        for path in self._all():
            if path not in self._unreadable:
                self._remove(path)
        shutil.rmtree(self.path / _BEING_DELETED, ignore_errors=True)
        self.lock.release()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _all(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        return sorted((each for each in self.path.iterdir() if _NAME.fullmatch(each.name)), key=_number)

    def _prune(self) -> None:
        for path in self._all()[:-NUM_KEPT]:
            if path not in self._unreadable:
                try:
                    if self._readable.get(path) != _files_of(path):
                        _read(path)
                except (OSError, ValueError, KeyError):
                    self._unreadable.add(path)
            if path not in self._unreadable:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        # Renamed first: one that is half deleted when the process is killed must not look like one that was damaged.
        doomed = self.path / _BEING_DELETED
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _files_of(folder: Path) -> list[tuple[str, int, int]]:
    """Returns the name, size and time of change of each file of a checkpoint: a change of its content changes one."""
    found = [(each.name, each.stat()) for each in folder.iterdir()]
    return sorted((name, status.st_size, status.st_mtime_ns) for name, status in found)


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _has_objects(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.hasobject


def arrays_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the arrays of a checkpoint by part and name, `DeferredArray` too."""
    return {
        f"{part}/{name}": value
        for part, state in checkpoint.items()
        for name, value in state.items()
        if isinstance(value, (np.ndarray, DeferredArray))
    }


def split(checkpoint: Checkpoint) -> tuple[dict[str, State], dict[str, Any]]:
    """Returns the values that JSON can write, and the arrays by part and name."""
    arrays = arrays_of(checkpoint)
    values = {
        part: {name: value for name, value in state.items() if f"{part}/{name}" not in arrays}
        for part, state in checkpoint.items()
    }
    return values, arrays


def _write(folder: Path, values: Mapping[str, State], arrays: Mapping[str, Any]) -> None:
    with open(folder / _ARRAYS, "wb") as file:
        write_arrays(file, arrays, [0])
        file.flush()
        os.fsync(file.fileno())
    state = json.dumps(values)
    text = json.dumps(
        {"format": FORMAT, "arrays": _digest(folder / _ARRAYS), "check": _digest_of(state.encode()), "state": state}
    )
    with open(folder / _STATE, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def _read(folder: Path) -> Checkpoint:
    written = json.loads((folder / _STATE).read_text())
    if written["format"] != FORMAT:
        raise ValueError(f"format {written['format']}, and this kdist reads format {FORMAT}")
    if _digest_of(written["state"].encode()) != written["check"]:
        raise ValueError(f"{_STATE} is damaged")
    if _digest(folder / _ARRAYS) != written["arrays"]:
        raise ValueError(f"{_ARRAYS} is incomplete or damaged")
    checkpoint: dict[str, State] = json.loads(written["state"])
    for key, array in open_arrays(folder / _ARRAYS).items():
        part, _, name = key.partition("/")
        # A model is large, and is read variable by variable.
        checkpoint[part][name] = array if part == MODEL else np.asarray(array)
    return checkpoint


def _digest(path: Path) -> str:
    digest = hashlib.blake2b()  # Python 3.10 has no `hashlib.file_digest`
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _digest_of(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()


def _sync(folder: Path) -> None:
    """Flushes the names in a directory to disk, so that a crash of the host does not undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
