"""Writes checkpoints in a thread, so that training goes on meanwhile."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import numpy as np

from kdist.checkpoint.storage.files import Checkpoint

_NICENESS = 5  # of the thread: a third of a core that it shares with the training, all of one that is idle


class BackgroundWriter:
    """Writes one checkpoint at a time; of those that come meanwhile the newest waits, and the others are left out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what follows
        self._thread: threading.Thread | None = None
        self._waiting: tuple[Callable[[Checkpoint], object], Checkpoint] | None = None
        self._written: list[Checkpoint] = []  # copies whose memory the next ones take: new pages cost more than a copy
        self._error: BaseException | None = None

    def __reduce__(self) -> tuple[type[BackgroundWriter], tuple[()]]:
        return BackgroundWriter, ()  # a copy of a callback, as tuners make them, has a thread of its own

    def write(self, write: Callable[[Checkpoint], object], checkpoint: Checkpoint) -> None:
        """Copies a checkpoint, to be written in a thread, and returns.

        Args:
            write: function of the checkpoint.
            checkpoint: `Checkpoint`.

        Raises:
            CheckpointError: if an earlier one could not be written.
        """
        self._raise_error()
        with self._lock:
            if self._waiting is not None:  # two at a time are in memory, one of them being written
                self._written.append(self._waiting[1])
                self._waiting = None
            memory = self._written.pop() if self._written else {}
        copy = {
            part: {name: _copied(value, memory.get(part, {}).get(name)) for name, value in state.items()}
            for part, state in checkpoint.items()
        }
        with self._lock:
            self._waiting = write, copy
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kdist-checkpoint")
                self._thread.start()

    def wait(self) -> None:
        """Waits until the newest is written.

        Raises:
            CheckpointError: if one could not be.
        """
        thread = self._thread
        if thread is not None:
            thread.join()
        self._written.clear()
        self._raise_error()

    def _run(self) -> None:
        if sys.platform == "linux":  # where each thread has a niceness of its own
            os.nice(_NICENESS)
        while True:
            with self._lock:
                if self._waiting is None:
                    self._thread = None
                    return
                (write, copy), self._waiting = self._waiting, None
            try:
                write(copy)
            except BaseException as error:  # raised in the thread of the training
                self._error = error
            with self._lock:
                self._written.append(copy)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _copied(value: object, memory: object) -> object:
    """Returns a copy of an array, in the memory of another one if that has its shape and dtype; other values as is."""
    if not isinstance(value, np.ndarray):
        return value
    if not isinstance(memory, np.ndarray) or (memory.shape, memory.dtype) != (value.shape, value.dtype):
        return np.array(value)
    np.copyto(memory, value)
    return memory
