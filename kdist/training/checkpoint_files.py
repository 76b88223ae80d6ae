"""Checkpoints on disk: each a directory that appears whole, or not at all. NumPy and JSON, no pickle."""

from __future__ import annotations

import contextlib
import dataclasses
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
import numpy.typing as npt

from kdist.errors import CheckpointError
from kdist.training.claim import Claim

logger = logging.getLogger("kdist")

Arrays = Mapping[str, npt.NDArray[Any]]

FORMAT = 1
NUM_KEPT = 2
_NAME = re.compile(r"checkpoint-(\d{8,})")
_UNFINISHED, _BEING_DELETED = ".checkpoint-being-written", ".checkpoint-being-deleted"
_ARRAYS, _STATE = "arrays.npz", "state.json"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What is saved: numbers and words, and arrays by name.

    Attributes:
        state: dictionary, anything that JSON can write.
        arrays: mapping of names to arrays of NumPy's own dtypes.
    """

    state: dict[str, Any]
    arrays: Arrays


class CheckpointFolder:
    """The newest checkpoints of one training.

    A checkpoint is written under another name and renamed; the one before it is kept. What cannot be read is left
    where it is.

    Args:
        path: str or path, the directory; made when something is written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._unreadable: set[Path] = set()
        self.claim = Claim(self.path)
        """`Claim`, for who writes there."""

    def write(self, checkpoint: Checkpoint) -> Path:
        """Writes the newest checkpoint and deletes those before its predecessor.

        Returns:
            The path of its directory.

        Raises:
            CheckpointError: if it cannot be written; those before it are as they were.
        """
        if objects := [name for name, array in checkpoint.arrays.items() if array.dtype.hasobject]:
            raise CheckpointError(
                f"Python objects are not saved: to read them would be to run them. Received: arrays of objects "
                f"{objects}. Expected numbers. Fix: convert them first."
            )
        number = max((_number(each) for each in self._all()), default=0) + 1
        unfinished, target = self.path / _UNFINISHED, self.path / f"checkpoint-{number:08d}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            _write(unfinished, checkpoint)
            unfinished.rename(target)
            _sync(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                shutil.rmtree(unfinished)
            raise CheckpointError(
                f"A checkpoint cannot be written. Received: {error}. Expected to write {target}, with room for "
                f"{sum(array.nbytes for array in checkpoint.arrays.values()) / 2**20:.1f} MiB beside the one before "
                "it, which is as it was. Fix: make room, or give another backup_dir."
            ) from error
        self._prune()
        return target

    def read(self) -> tuple[Path, Checkpoint] | None:
        """Returns the newest checkpoint that can be read, and its directory; `None` if there never was one.

        Raises:
            CheckpointError: if there are some, and none can be read.
        """
        reasons = []
        for path in reversed(self._all()):
            try:
                found = _read(path)
            except (OSError, ValueError, KeyError) as error:  # cut off, damaged, or of another format
                self._unreadable.add(path)
                reasons.append(f"{path.name}: {error}")
                continue
            if reasons:
                logger.warning(
                    "%s cannot be read (%s); it is left where it is. Training goes on from the one before it, %s.",
                    self.path / reasons[0].partition(":")[0], "; ".join(reasons), path.name,
                )  # fmt: skip
            return path, found
        if reasons:
            raise CheckpointError(
                f"No checkpoint can be read. Received: {self.path} with {'; '.join(reasons)}. Expected one that is "
                "whole. Fix: move the directory away to train from the beginning, or give another backup_dir."
            )
        return None

    def delete(self) -> None:
        """Deletes the checkpoints, and the directory if nothing else is in it. What could not be read stays."""
        shutil.rmtree(self.path / _UNFINISHED, ignore_errors=True)
        for path in self._all():
            if path not in self._unreadable:
                self._remove(path)
        shutil.rmtree(self.path / _BEING_DELETED, ignore_errors=True)
        self.claim.release()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _all(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        return sorted((each for each in self.path.iterdir() if _NAME.fullmatch(each.name)), key=_number)

    def _prune(self) -> None:
        for path in self._all()[:-NUM_KEPT]:
            if path in self._unreadable:
                continue
            try:
                _read(path)
            except (OSError, ValueError, KeyError):
                self._unreadable.add(path)
                continue
            self._remove(path)

    def _remove(self, path: Path) -> None:
        # Renamed first: one that is half deleted when the process is killed must not look like one that was damaged.
        doomed = self.path / _BEING_DELETED
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    with open(folder / _ARRAYS, "wb") as file:
        np.savez(file, **checkpoint.arrays)  # type: ignore[arg-type]  # names are never `allow_pickle`
        file.flush()
        os.fsync(file.fileno())
    state = json.dumps(checkpoint.state)
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
        raise ValueError(f"{_ARRAYS} is cut off or damaged")
    with np.load(folder / _ARRAYS, allow_pickle=False) as arrays:
        return Checkpoint(json.loads(written["state"]), {name: arrays[name] for name in arrays.files})


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest() if hasattr(hashlib, "file_digest") else _slow(file)


def _slow(file: Any) -> str:  # Python 3.10
    digest = hashlib.blake2b()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def _digest_of(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()


def _sync(folder: Path) -> None:
    """Has the names in a directory written to disk, so that a crash of the host does not undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
