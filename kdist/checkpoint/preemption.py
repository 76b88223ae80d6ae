"""Preemption: after a signal to any rank, all ranks finish their step, save and exit."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import string
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import keras

from kdist.checkpoint.all_ranks_callback import AllRanksCallback
from kdist.checkpoint.backup_and_restore import BackupAndRestore
from kdist.errors import ScopeError, StrategyError
from kdist.keras_hooks.fit.callbacks import RunningFit
from kdist.restarts import request
from kdist.restarts.events import Kind, own_reports

logger = logging.getLogger("kdist")

_SAME_NOTICE = 1.0  # seconds: at a job's time limit, Slurm sends SIGTERM twice within milliseconds


class Preemption(AllRanksCallback):
    """Saves and exits when a scheduler preempts the job.

    After a signal to any rank, all ranks finish the same step (the request is sent in a step's own message), save by
    `kdist.callbacks.BackupAndRestore`, or else by `keras.callbacks.ModelCheckpoint`, and raise `SystemExit`. After the
    last step of an epoch, the epoch and its validation end first. A second signal, a second later or more, has its
    usual effect.

    `kdist run --restarts 3 --max-np M` asks for the same when it can start a larger job.

    The exit code makes the scheduler restart the job: 75 is `EX_TEMPFAIL` of BSD's `sysexits.h` (Slurm:
    `RequeueExit=75` in slurm.conf, or `scontrol requeue $SLURM_JOB_ID` in the batch script; LSF:
    `REQUEUE_EXIT_VALUES`). Open MPI's mpirun forwards SIGUSR1 to the ranks; after a SIGTERM to itself it ends them
    within seconds. So have the scheduler send SIGUSR1 (Slurm: `--signal=USR1@120`), or the signal to the ranks.

    Args:
        exit_code: int from 1 to 255, the exit code of the process.
        signals: sequence of str, the names of the handled signals.

    Raises:
        StrategyError: if an argument is invalid.
        ScopeError: when training begins, if there is no callback that saves.

    Example:
    ```python
    callbacks = [kdist.callbacks.BackupAndRestore("backup", save_freq=500), kdist.callbacks.Preemption()]
    ```
    """

    position = 1

    def __init__(self, exit_code: int = 75, signals: Sequence[str] = ("SIGTERM", "SIGUSR1")) -> None:
        super().__init__()
        is_code = isinstance(exit_code, int) and 0 < exit_code < 256
        are_named = not isinstance(signals, str) and set(signals) <= set(signal.Signals.__members__)
        if not (is_code and are_named):
            raise StrategyError(
                f"An argument of Preemption is invalid. Received: exit_code={exit_code!r}, signals={signals!r}. "
                "Expected a number from 1 to 255, as 0 says that the training has ended, and names as "
                '("SIGTERM", "SIGUSR1"). Fix: change it.'
            )
        self.exit_code = exit_code
        self.signals = tuple(signals)
        self._handlers: dict[int, Any] = {}
        self._fit: RunningFit | None = None
        self._received: str | None = None
        self._received_at = 0.0
        self._request: str | None = None  # of `kdist run`, and why
        self._epoch = 0

    def settings(self) -> dict[str, Any]:
        """Returns the arguments, by name."""
        return {"exit_code": self.exit_code, "signals": list(self.signals)}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Installs the signal handlers; raises `ScopeError` without a callback that saves."""
        saving = (BackupAndRestore, keras.callbacks.ModelCheckpoint)
        if self.is_chief and not any(isinstance(each, saving) for each in self._all()):
            raise ScopeError(
                f"Preemption needs a callback that saves. Received: callbacks "
                f"{[type(each).__name__ for each in self.others]}. Expected kdist.callbacks.BackupAndRestore, or "
                "keras.callbacks.ModelCheckpoint, among them. Fix: add one of these."
            )
        self.clean_up()  # of a `fit` that raised
        self._received, self._request, self._fit = None, None, RunningFit(self)
        self.session.votes.withdraw("preempt")
        if self.is_chief and self._backups():
            own_reports.can_leave()
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "Preemption handles no signals: fit does not run in the main thread, where Python handles signals"
            )
            return
        for name in self.signals:
            number = getattr(signal, name)
            self._handlers[number] = signal.signal(number, self._handle)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves and exits, if all ranks know of a signal."""
        self._read_request()
        if self.exits:
            self._save_and_exit(batch, logs or {})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves and exits, if all ranks know of a signal."""
        if self.exits:
            self._save_and_exit(None, logs or {})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Saves and exits, if all ranks know of a signal, as of one in the last save; restores the handlers."""
        if self.exits and all(each.is_kept for each in self._backups()):
            self._save_and_exit(None, logs or {})
        self.clean_up()
        if self._received is not None:
            logger.warning(
                "%s came when fit had ended: the script goes on, and another signal has its usual effect",
                self._received,
            )  # fmt: skip

    def clean_up(self) -> None:
        """Restores the signal handlers, after an error too."""
        while self._handlers:
            number, handler = self._handlers.popitem()
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_over = self._fit is None or self._fit.is_over(frame)
        if not is_over and self._received is not None and now < self._received_at + _SAME_NOTICE:
            return
        # A second signal has its usual effect, and so has one after a `fit` that raised.
        if is_over or self._received is not None:
            self.clean_up()
            os.kill(os.getpid(), number)
            return
        self._received, self._received_at = signal.Signals(number).name, now
        self.session.votes.cast("preempt")

    def _read_request(self) -> None:
        if own_reports.rank == 0 and self._request is None:
            self._request = request.read(own_reports.running)
            if self._request is not None:
                self.session.votes.cast("preempt")

    @property
    def exits(self) -> bool:
        """Whether all ranks know of a signal or a request."""
        return "preempt" in self.session.votes.agreed

    def _all(self) -> list[Any]:
        return [*self.others, *self.siblings]

    def _backups(self) -> list[BackupAndRestore]:
        return [each for each in self._all() if isinstance(each, BackupAndRestore)]

    def _save_and_exit(self, batch: int | None, logs: dict[str, Any]) -> None:
        backups = self._backups()
        # The last step of an epoch is saved after the epoch, with its validation.
        is_saved = [each.save(0 if batch is None else batch + 1) for each in backups]  # no short circuit
        if not all(is_saved):
            return
        for each in backups:
            each.wait_until_written()
        if not backups:
            self.session.synchronize()
            for each in self._all():
                if isinstance(each, keras.callbacks.ModelCheckpoint):
                    self._save_with(each, batch, logs)
        received = self.session.engine.gather_objects([self._received, self._request])  # also waits until all is saved
        if self.is_chief:
            by_rank = {rank: name for rank, (name, _) in enumerate(received) if name}
            said = [f"{name} on rank {rank}" for rank, name in by_rank.items()]
            why = ", ".join([*said, *filter(None, [self._request])])
            when = "at the end of" if batch is None else f"after step {batch + 1} of"
            logger.warning(
                "%s: saved %s epoch %d; exiting with code %d, to be restarted",
                why, when, self._epoch + 1, self.exit_code,
            )  # fmt: skip
            if by_rank:
                first = min(by_rank)
                own_reports.failed(Kind.PREEMPTION, f"was preempted by {by_rank[first]}, all is saved", first)
            elif self._request == request.LARGER_JOB:
                own_reports.failed(Kind.RESIZE, "all ranks have saved and left, for a larger job", None)
            else:
                own_reports.failed(Kind.PREEMPTION, f"all ranks have saved and left, by {self._request}", None)
        if own_reports.rank == 0 and own_reports.running is not None:
            request.remove(own_reports.running)  # `kdist run` may be on another host
        self.clean_up()
        raise SystemExit(self.exit_code)

    def _save_with(self, checkpoint: Any, batch: int | None, logs: dict[str, Any]) -> None:
        known = {"epoch": self._epoch + 1, "batch": (batch or 0) + 1, **logs}
        fields = (name for _, name, _, _ in string.Formatter().parse(checkpoint.filepath) if name)
        # A validation metric may be missing.
        path = checkpoint.filepath.format(**{**dict.fromkeys(fields, float("nan")), **known})
        if checkpoint.save_best_only and os.path.exists(path):  # the best model stays
            suffix = next(each for each in (".weights.h5", ".keras", "") if path.endswith(each))
            path = f"{path.removesuffix(suffix)}-preempted{suffix}"
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True) if self.is_chief else None
        self.model.save_weights(path) if checkpoint.save_weights_only else self.model.save(path)
