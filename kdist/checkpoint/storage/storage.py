"""Where the checkpoints of one training are: in a directory of rank 0, and in the memory of hosts."""

from __future__ import annotations

import functools
import logging
from typing import Literal

from kdist.checkpoint.storage.arrays import send
from kdist.checkpoint.storage.background_writer import BackgroundWriter
from kdist.checkpoint.storage.files import Checkpoint, CheckpointDirectory, arrays_of
from kdist.checkpoint.storage.host_copies import HostCopies
from kdist.engines.engine import Engine
from kdist.engines.single import SingleEngine
from kdist.errors import CheckpointError
from kdist.reports.log import once
from kdist.restarts.events import own_reports
from kdist.restarts.progress import own_progress
from kdist.state.part import DeferredArray

logger = logging.getLogger("kdist")


class CheckpointStorage:
    """Writes the checkpoints of one training, and finds the newest.

    Args:
        backup_dir: str or path, the directory.
    """

    def __init__(self, backup_dir: str) -> None:
        self._backup_dir = backup_dir
        self._directory = CheckpointDirectory(backup_dir)
        self._writer = BackgroundWriter()
        self._engine: Engine = SingleEngine()
        self._copies: HostCopies | None = None
        self._is_asynchronous = False
        self._is_on_disk = True  # whether the checkpoint that was found is

    def open(self, engine: Engine, *, asynchronous: bool, memory_freq: int | Literal["auto"] | None) -> None:
        """Locks the directory, and begins to copy into the memory of hosts.

        Collective: every rank must call this, in the same order.

        Args:
            engine: `Engine`, how the ranks communicate.
            asynchronous: bool, whether rank 0 writes in a thread.
            memory_freq: the steps between two copies in the memory of each host, `"auto"`, or `None` for none.

        Raises:
            CheckpointError: if another training uses the directory.
        """
        self._engine, self._is_asynchronous = engine, asynchronous
        if self._is_chief:
            self._directory.lock.acquire(job=own_reports.job)
        # Only another attempt would look for copies.
        if memory_freq is not None and own_reports.job:
            self._copies = HostCopies(engine, own_reports.job, self._backup_dir, memory_freq)
        elif memory_freq is not None and self._is_chief:
            logger.warning(
                "memory_freq has no effect: nothing starts this training again. Received: memory_freq=%r without "
                "`kdist run --restarts`. Fix: kdist run -np N --restarts 3 SCRIPT.", memory_freq,
            )  # fmt: skip

    def unlock(self) -> None:
        """Lets other trainings use the directory."""
        self._directory.lock.release()

    def end(self, *, delete: bool) -> None:
        """Ends a training that has trained all of its epochs, which needs no copies in memory.

        Args:
            delete: bool, whether the checkpoints in the directory are deleted.
        """
        self.wait()
        if delete and self._is_chief:
            self._directory.delete()
        self.unlock()
        if self._copies is not None:
            self._copies.delete()

    def wait(self) -> None:
        """Waits until all is on disk; raises `CheckpointError` if it could not be written."""
        self._writer.wait()

    @property
    def _is_chief(self) -> bool:
        return self._engine.rank == 0

    # Writing.

    def made_steps(self, number: int) -> None:
        """Counts steps: copies are made every few of them."""
        if self._copies is not None:
            self._copies.made_steps(number)

    @property
    def copy_is_due(self) -> bool:
        """Whether a copy is to be made after this step."""
        return self._copies is not None and self._copies.is_due

    def write(self, checkpoint: Checkpoint, place: tuple[int, int], began: float) -> None:
        """Writes a checkpoint to the directory, and to the memory of hosts.

        Collective: every rank must call this, in the same order.

        Args:
            checkpoint: `Checkpoint`.
            place: pair of ints, the epoch and its step in which training would go on.
            began: float, when the checkpoint was begun, by the monotonic clock.
        """
        # Copied first: the time of the disk write must not count as the time of the copy.
        self.copy(checkpoint, place, began)
        # Parts of which each rank has some are made now, by all ranks.
        is_deferred = any(isinstance(each, DeferredArray) for state in checkpoint.values() for each in state.values())
        if is_deferred and self._is_chief and self._is_asynchronous:
            once.warning("asynchronous=True has no effect with state in parts: all ranks send their parts in the step")
        write = functools.partial(self._write, place, own_progress.steps)
        if self._is_chief and self._is_asynchronous and not is_deferred:
            self._writer.write(write, checkpoint)
        elif self._is_chief:
            write(checkpoint)
        else:
            send(arrays_of(checkpoint), [0])
        if self._copies is not None:
            self._copies.begin_steps()

    def _write(self, place: tuple[int, int], steps: int, checkpoint: Checkpoint) -> None:
        logger.debug("saved %s", self._directory.write(checkpoint))
        own_progress.saved(*place, steps, checkpoint_number(checkpoint))
        own_progress.flush()

    def copy(self, checkpoint: Checkpoint, place: tuple[int, int], began: float) -> None:
        """Writes a checkpoint to the memory of hosts alone; see `write`.

        Collective: every rank must call this, in the same order.
        """
        if self._copies is not None and self._copies.write(checkpoint, began) and self._is_chief:
            own_progress.saved(*place, own_progress.steps, checkpoint_number(checkpoint))

    def write_found(self, checkpoint: Checkpoint) -> None:
        """Writes the checkpoint that `newest` has found to the directory, if it was in memory only.

        Collective: every rank must call this, in the same order.
        """
        if not self._is_on_disk and self._is_chief:
            self._directory.write(checkpoint)
        elif not self._is_on_disk:
            send(arrays_of(checkpoint), [0])
        self._is_on_disk = True

    # Reading.

    def newest(self) -> tuple[Checkpoint | None, int, str]:
        """Returns the newest checkpoint on the rank that has it, and `None` on the others; that rank, and its name.

        Collective: every rank must call this, in the same order.
        """
        found, unreadable = None, None
        try:
            found = self._directory.read() if self._is_chief else None
        except CheckpointError as error:
            unreadable = error
        path, checkpoint = (None, None) if found is None else found
        name = "" if path is None else path.name
        if self._copies is None:
            if unreadable is not None:
                raise unreadable
            return checkpoint, 0, name
        on_disk = self._engine.broadcast_object(0 if checkpoint is None else checkpoint_number(checkpoint))
        in_memory, rank = self._copies.newest()
        self._is_on_disk = in_memory <= on_disk
        if unreadable is not None and in_memory == 0:
            raise unreadable
        if self._is_on_disk:
            return checkpoint, 0, name
        copy = self._copies.read() if self._engine.rank == rank else None
        return copy, rank, f"the memory of rank {rank}'s host"


def checkpoint_number(checkpoint: Checkpoint) -> int:
    """Returns a checkpoint's number: later ones have greater numbers, and 0 is of an old version's."""
    number: int = checkpoint["training"].get("number", 0)
    return number
