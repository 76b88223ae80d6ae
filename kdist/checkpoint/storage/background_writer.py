"""Writes checkpoints in a thread, so that training goes on meanwhile."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import numpy as np

from kdist.checkpoint.storage.files import Checkpoint


class BackgroundWriter:
    """Writes one checkpoint at a time; of those that come meanwhile the newest waits, and the others are left out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what follows
        self._thread: threading.Thread | None = None
        self._waiting: Callable[[], object] | None = None
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
            self._waiting = None  # before the copy: two at a time are in memory, one of them being written
        copy = {part: {name: _copied(value) for name, value in state.items()} for part, state in checkpoint.items()}
        with self._lock:
            self._waiting = functools.partial(write, copy)
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
        self._raise_error()

    def _run(self) -> None:
        while True:
            with self._lock:
                write, self._waiting = self._waiting, None
                if write is None:
                    self._thread = None
                    return
            try:
                write()
            except BaseException as error:  # raised in the thread of the training
                self._error = error

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _copied(value: object) -> object:
    return np.array(value) if isinstance(value, np.ndarray) else value
