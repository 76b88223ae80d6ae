"""Writes checkpoints in a thread, so that training goes on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from kdist.checkpoint.files import Checkpoint


class BackgroundWriter:
    """Writes one checkpoint at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def write(self, write: Callable[[Checkpoint], object], checkpoint: Checkpoint) -> None:
        """Copies a checkpoint, and writes it in a thread; first it waits for the one before.

        Args:
            write: function of the checkpoint.
            checkpoint: `Checkpoint`.

        Raises:
            CheckpointError: if the one before could not be written.
        """
        self.wait()
        copy = {part: {name: _copied(value) for name, value in state.items()} for part, state in checkpoint.items()}

        def run() -> None:
            try:
                write(copy)
            except BaseException as error:  # raised in the thread of the training
                self._error = error

        self._thread = threading.Thread(target=run, name="kdist-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until all is written.

        Raises:
            CheckpointError: if it could not be.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def _copied(value: object) -> object:
    return np.array(value) if isinstance(value, np.ndarray) else value
