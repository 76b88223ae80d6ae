"""Copies of a training's checkpoints in the memory of all hosts: when they are made, and which one is the newest."""

from __future__ import annotations

import logging
import math
import platform
import time
from typing import Literal

from kdist.checkpoint.storage.arrays import send
from kdist.checkpoint.storage.broadcast import broadcast_checkpoint
from kdist.checkpoint.storage.files import Checkpoint, arrays_of
from kdist.checkpoint.storage.memory_copies import MemoryCopies
from kdist.engines.engine import Engine
from kdist.restarts.memory import MEMORY, delete_old
from kdist.state.part import MODEL

logger = logging.getLogger("kdist")

_COST = 0.01  # of the training's time, at most, with `"auto"`
_FIRST = 10  # steps before the first copy with `"auto"`, which measures


class HostCopies:
    """The copies that one rank of each host makes.

    Collective: every rank must construct it, in the same order.

    Args:
        engine: `Engine`, how the ranks communicate.
        job: str, what distinguishes this job, with all its attempts, from others.
        backup_dir: str, what distinguishes the training from others of the job.
        freq: int or `"auto"`, the steps between two copies.
    """

    def __init__(self, engine: Engine, job: str, backup_dir: str, freq: int | Literal["auto"]) -> None:
        self._engine = engine
        self._files = MemoryCopies(job, backup_dir) if engine.local_rank == 0 and MEMORY.is_dir() else None
        has_files = engine.gather_objects(self._files is not None)
        self._writers = [rank for rank, it in enumerate(has_files) if it]
        self._warn("" if MEMORY.is_dir() or engine.local_rank else f"no such directory on host {platform.node()}")
        self._is_measured = freq == "auto"
        self._every = _FIRST if freq == "auto" else freq
        self._steps = 0  # since the last copy
        self._ended = time.monotonic()  # when that was made
        if self._files is not None:
            delete_old(besides=job)

    def made_steps(self, number: int) -> None:
        """Counts steps.

        Args:
            number: int, how many.
        """
        self._steps += number

    def begin_steps(self) -> None:
        """Leaves out of the time of the steps what came before, as a write to the disk."""
        self._ended = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether a copy is to be made after this step."""
        return self._steps >= self._every

    def write(self, checkpoint: Checkpoint, began: float) -> bool:
        """Copies a checkpoint into the memory of each host, and returns whether this host has it.

        Collective: every rank must call this, in the same order.

        Args:
            checkpoint: `Checkpoint`.
            began: float, when the checkpoint was begun, by the monotonic clock.
        """
        if self._engine.local_size < self._engine.size:  # what callbacks hold may differ, and the chief's is right
            rest = {part: state for part, state in checkpoint.items() if part != MODEL}
            checkpoint = {**checkpoint, **(broadcast_checkpoint(self._engine, rest) or {})}
        problem = ""
        if self._files is None:
            send(arrays_of(checkpoint), self._writers)
        else:
            try:
                self._files.write(checkpoint, checkpoint["training"]["number"], self._writers)
            except OSError as error:
                problem = f"{error} on host {platform.node()}"
                self._files.delete()
                self._files = None
        self._warn(problem)
        now = time.monotonic()
        if self._is_measured:
            step = max((began - self._ended) / max(self._steps, 1), 1e-6)
            self._every = self._engine.broadcast_object(max(1, math.ceil((now - began) / (_COST * step))))
        self._ended, self._steps = now, 0
        return self._files is not None

    def _warn(self, problem: str) -> None:
        """Warns on rank 0 of hosts that make no copies from now on: `kdist run` does not show what others log.

        Collective: every rank must call this, in the same order.
        """
        is_alone = self._engine.local_size == self._engine.size
        problems = [problem] if is_alone else self._engine.gather_objects(problem)
        if self._engine.rank == 0 and (problems := list(filter(None, problems))):
            logger.warning(
                "the checkpoint is not copied into the memory of a host, and no other will be. Received: %s. Expected "
                "space for two of them in %s. Fix: free some there, or omit memory_freq.", "; ".join(problems), MEMORY,
            )  # fmt: skip

    def newest(self) -> tuple[int, int]:
        """Returns the number of the newest copy, 0 if there is none, and the lowest rank that has it.

        Collective: every rank must call this, in the same order.
        """
        numbers = self._engine.gather_objects(0 if self._files is None else self._files.newest())
        return max(numbers), numbers.index(max(numbers))

    def read(self) -> Checkpoint | None:
        """Returns the newest copy of this host, if this rank makes its copies."""
        return None if self._files is None else self._files.read()

    def delete(self) -> None:
        """Deletes the copies of this host."""
        if self._files is not None:
            self._files.delete()
