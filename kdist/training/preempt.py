"""When the scheduler wants the machine back: all ranks finish their step, save, and leave with one exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import string
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import keras

from kdist.errors import ScopeError
from kdist.training.backup import Backup
from kdist.training.job_wide import JobWide

logger = logging.getLogger("kdist")


class Preempt(JobWide):
    """What `kdist.callbacks.Preemption` does.

    Args:
        exit_code: int, what the process ends with.
        signals: sequence of str, the names of the signals that are heeded.
    """

    def __init__(self, exit_code: int = 75, signals: Sequence[str] = ("SIGTERM", "SIGUSR1")) -> None:
        super().__init__()
        self.exit_code = exit_code
        self.signals = tuple(signals)
        self._handlers: dict[int, Any] = {}
        self._received: str | None = None
        self._epoch = 0

    def settings(self) -> dict[str, Any]:
        """Returns the arguments, by name."""
        return {"exit_code": self.exit_code, "signals": list(self.signals)}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to listen.

        Raises:
            ScopeError: if nothing among the callbacks could save.
        """
        if self.is_chief and not any(
            isinstance(each, (Backup, keras.callbacks.ModelCheckpoint)) for each in self._all()
        ):
            raise ScopeError(
                f"Preemption has nothing to save with. Received: callbacks "
                f"{[type(each).__name__ for each in self.others]}. Expected kdist.callbacks.BackupAndRestore, or "
                "keras.callbacks.ModelCheckpoint, among them. Fix: add one."
            )
        self._received = None
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "Preemption hears no signals: fit runs in a thread, and Python handles signals in the main one"
            )
            return
        for name in self.signals:
            number = getattr(signal, name)
            self._handlers[number] = signal.signal(number, self._note)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves and leaves, if all ranks know that one of them was told to."""
        if self._is_agreed():
            self._leave_job(batch, logs or {})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves and leaves, if one of the ranks was told to."""
        if self._is_agreed():
            self._leave_job(None, logs or {})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Listens no more."""
        self.leave()

    def leave(self) -> None:
        """Listens no more, however the verb has ended."""
        super().leave()
        while self._handlers:
            number, handler = self._handlers.popitem()
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:  # again: whoever sends it means it
            self.leave()
            os.kill(os.getpid(), number)
            return
        self._received = signal.Signals(number).name
        if self.owner is not None:
            self.owner.requests.ask("preempt")

    def _is_agreed(self) -> bool:
        return self._received is not None if self.owner is None else "preempt" in self.owner.requests.granted

    def _all(self) -> list[Any]:
        return [*self.others, *self.siblings]

    def _leave_job(self, batch: int | None, logs: dict[str, Any]) -> None:
        backups = [each for each in self._all() if isinstance(each, Backup)]
        # In an epoch's last step the rest of the epoch comes first, validation too: what is saved then is whole.
        is_saved = [each.save(0 if batch is None else batch + 1) for each in backups]  # all, not the first alone
        if not all(is_saved):
            return
        if not backups:
            for each in self._all():
                if isinstance(each, keras.callbacks.ModelCheckpoint):
                    self._save_by(each, batch, logs)
        received = [self._received]
        if self.owner is not None:
            received = self.owner.engine.gather_objects(self._received)  # and all is saved before anyone leaves
        if self.is_chief:
            who = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(received) if name)
            where = "at the end of" if batch is None else f"after step {batch + 1} of"
            logger.warning(
                "%s: saved %s epoch %d; leaving with exit code %d, to be started again",
                who,
                where,
                self._epoch + 1,
                self.exit_code,
            )
        self.leave()
        raise SystemExit(self.exit_code)

    def _save_by(self, checkpoint: Any, batch: int | None, logs: dict[str, Any]) -> None:
        known = {"epoch": self._epoch + 1, "batch": (batch or 0) + 1, **logs}
        fields = (name for _, name, _, _ in string.Formatter().parse(checkpoint.filepath) if name)
        # A validation metric, say, of an epoch that has not been validated.
        path = checkpoint.filepath.format(**{**dict.fromkeys(fields, float("nan")), **known})
        if checkpoint.save_best_only and os.path.exists(path):  # the best one so far
            suffix = next(each for each in (".weights.h5", ".keras", "") if path.endswith(each))
            path = f"{path.removesuffix(suffix)}-preempted{suffix}"
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True) if self.is_chief else None
        self.model.save_weights(path) if checkpoint.save_weights_only else self.model.save(path)
