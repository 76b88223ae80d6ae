"""How far an attempt has come, by its backups: numbers in a file that survive the chief's death at any moment."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kdist.restarts.events import Events, own_reports

_FILE = "progress"  # in the job's directory
_NUMBERS = struct.Struct("8q2d")
_PAUSE = 10.0  # seconds between two reports of steps by a chief whose file `kdist run` cannot read


@dataclasses.dataclass
class Progress:
    """The steps and checkpoints of an attempt.

    Attributes:
        fits: int, how many calls of `fit` with a backup have begun.
        steps: int, how many steps these have trained.
        saved_steps: int, how many of them the last save keeps: another attempt trains calls that have ended again.
        number: int, that of the last checkpoint, which is greater for later ones, in other attempts too; 0 for none.
        saved_fit: int, which of these calls wrote it, from 1; 0 for none.
        epoch: int, the epoch of the last one.
        epoch_step: int, its step in that epoch.
        resumed: int, the number of the checkpoint from which a `fit` that has saved went on; 0 for none.
        first_step: float, when the first step had ended, in seconds since 1970; 0 for never.
        last_save: float, when the last checkpoint had been written; 0 for never.
    """

    fits: int = 0
    steps: int = 0
    saved_steps: int = 0
    number: int = 0
    saved_fit: int = 0
    epoch: int = 0
    epoch_step: int = 0
    resumed: int = 0
    first_step: float = 0.0
    last_save: float = 0.0

    @property
    def place(self) -> tuple[int, int, int]:
        """The place of the last checkpoint, later in the script where it is greater; zeros without one."""
        return self.saved_fit, self.epoch, self.epoch_step


class OwnProgress:
    """The progress of this process, if it is the chief of `kdist run --restarts`; else nothing is kept."""

    def __init__(self) -> None:
        self._now = Progress()
        self._resumed = 0  # the number of the checkpoint from which this `fit` went on
        self._memory: mmap.mmap | None = None
        self._sent = 0.0  # when the numbers were, by the monotonic clock
        self._ended: collections.Counter[str] = collections.Counter()  # fits, by their directory
        self._ended_steps = 0  # of those
        self._lock = threading.Lock()  # a checkpoint may be written in a thread

    def fit_begins(self) -> None:
        """Records that a `fit` with a backup begins."""
        if own_reports.directory is None:
            return
        self._now.fits += 1
        self._resumed = 0
        if self._memory is None:
            with contextlib.suppress(OSError):  # on another host than `kdist run`
                self._memory = _mapped(own_reports.directory / _FILE)
        self._write()
        self._send()

    def begin_again(self, *, is_chief: bool) -> tuple[int | None, float]:
        """Begins again with the script, which this process runs again after ranks were lost.

        The last checkpoint stays.

        Args:
            is_chief: bool, whether it is the chief now; the one of before may have been lost.

        Returns:
            The steps since the last checkpoint, `None` without a backup, and when that was written; for the chief.
        """
        self._memory = None
        self._ended.clear()
        self._ended_steps = 0
        found = None if own_reports.directory is None else _read(own_reports.directory)
        if found is None or not is_chief:
            self._now = Progress()
            return None, 0.0
        self._now = dataclasses.replace(found, fits=0, steps=0, saved_steps=0)
        return found.steps - found.saved_steps, found.last_save

    def fit_ends(self, backup_dir: str, *, is_chief: bool) -> None:
        """Counts a `fit` that has trained all of its epochs, and has deleted its checkpoints.

        Args:
            backup_dir: str, the directory that it was given.
            is_chief: bool, whether this process records the progress.
        """
        self._ended[os.path.abspath(backup_dir)] += 1
        if is_chief and own_reports.directory is not None:
            with self._lock:
                self._ended_steps, self._now.saved_steps = self._now.steps, 0
                self._write()
                self._send()

    def ended_fits(self, backup_dir: str) -> int:
        """Returns how many calls of `fit` with a directory this process has ended, in this run of the script."""
        return self._ended[os.path.abspath(backup_dir)]

    def fit_resumes(self, number: int) -> None:
        """Records that the `fit` that has begun goes on from a checkpoint.

        Args:
            number: int, the checkpoint's.
        """
        self._resumed = number

    def made_steps(self, number: int) -> None:
        """Records steps.

        Args:
            number: int, how many.
        """
        if own_reports.directory is None:
            return
        with self._lock:
            is_first = not self._now.first_step
            self._now.steps += number
            self._now.first_step = self._now.first_step or time.time()
            self._write()
            if is_first or time.monotonic() > self._sent + _PAUSE:
                self._send()
        if is_first:
            own_reports.made_step()  # in one process no other callback does

    @property
    def steps(self) -> int:
        """How many steps have been recorded."""
        return self._now.steps

    def saved(self, epoch: int, epoch_step: int, steps: int, number: int) -> None:
        """Records a checkpoint; nothing, if a later one of this `fit` has been.

        Args:
            epoch: int, the epoch in which training would go on.
            epoch_step: int, the step of that epoch.
            steps: int, the `steps` of the moment in which it was taken.
            number: int, the checkpoint's.
        """
        now = self._now
        with self._lock:
            if own_reports.directory is None or (now.fits == now.saved_fit and number < now.number):
                return
            now.number, now.saved_steps, now.last_save = number, steps - self._ended_steps, time.time()
            now.saved_fit, now.epoch, now.epoch_step = now.fits, epoch, epoch_step
            now.resumed = max(now.resumed, self._resumed)
            self._write()
            self._send()

    def flush(self) -> None:
        """Writes what is recorded to the disk: `kdist run` may read it on another host, from a disk that both have."""
        if self._memory is not None:
            with contextlib.suppress(OSError):
                self._memory.flush()

    def _write(self) -> None:
        if self._memory is not None:
            _NUMBERS.pack_into(self._memory, 0, *dataclasses.astuple(self._now))

    def _send(self) -> None:
        if self._memory is None:
            self._sent = time.monotonic()
            own_reports.progress(dataclasses.astuple(self._now))


own_progress = OwnProgress()
"""That of this process."""


def read(directory: str, events: Events) -> Progress | None:
    """Returns the progress of an attempt, or `None` if no `fit` with a backup began.

    Args:
        directory: str, the job's.
        events: `Events`, of an attempt whose chief may run on another host.
    """
    return _read(Path(directory)) or (None if events.progress is None else _of(events.progress))


def _read(directory: Path) -> Progress | None:
    with contextlib.suppress(OSError, struct.error):
        return _of(_NUMBERS.unpack((directory / _FILE).read_bytes()))
    return None


def _of(numbers: Sequence[float]) -> Progress:
    whole, times = numbers[:-2], numbers[-2:]
    return Progress(*map(int, whole), *times)


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "w+b") as file:
        file.write(bytes(_NUMBERS.size))
        file.flush()
        return mmap.mmap(file.fileno(), _NUMBERS.size)
