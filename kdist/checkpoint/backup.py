"""Backup and resume: saves a training between two steps or epochs, and resumes it there."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import keras

from kdist.checkpoint.all_ranks_callback import AllRanksCallback
from kdist.checkpoint.arrays import send
from kdist.checkpoint.background_writer import BackgroundWriter
from kdist.checkpoint.broadcast import broadcast_checkpoint
from kdist.checkpoint.callback_state import CallbackState
from kdist.checkpoint.files import Checkpoint, CheckpointDirectory, arrays_of
from kdist.checkpoint.host_copies import HostCopies
from kdist.errors import CheckpointError
from kdist.keras_hooks.trainer import layers_of, set_initial_epoch
from kdist.reports.log import once
from kdist.restarts.progress import own_progress
from kdist.restarts.report import own_reports
from kdist.state.part import DeferredArray, StatePart
from kdist.state.random_state import random_state, set_random_state
from kdist.state.single_process import KerasData, is_replaying
from kdist.state.variables import FIX_OF_UNTRACKED, ModelState

logger = logging.getLogger("kdist")


class Backup(AllRanksCallback):
    """The base of `kdist.callbacks.BackupAndRestore`, which replaces Keras' own on several ranks.

    Args:
        backup_dir: str or path, the directory of this training's checkpoints.
        save_freq: `"epoch"`, or the steps between two saves.
        delete_checkpoint: bool, whether the checkpoints are deleted at the end of `fit`.
        asynchronous: bool, whether training goes on while a checkpoint is written.
        memory_freq: the steps between two copies in the memory of each host, `"auto"`, or `None` for none.
    """

    def __init__(
        self,
        backup_dir: str,
        save_freq: Literal["epoch"] | int = "epoch",
        delete_checkpoint: bool = True,
        asynchronous: bool = False,
        memory_freq: int | Literal["auto"] | None = None,
    ) -> None:
        super().__init__()
        self.backup_dir = str(backup_dir)
        if "://" in self.backup_dir:
            raise CheckpointError(
                f"backup_dir is not on a file system. Received: backup_dir={self.backup_dir!r}. Expected a path, as a "
                "checkpoint is a directory that is renamed when it is complete. Fix: mount the storage, or give a "
                "local path and copy the directory before and after the training."
            )
        self.save_freq = save_freq
        self.delete_checkpoint = delete_checkpoint
        self.asynchronous = asynchronous
        self.memory_freq = memory_freq
        self._epoch = 0
        self._steps_since = 0
        self._last_batch = -1
        self._saved_at: tuple[int, int] | None = None
        self._random_at_fit: dict[str, Any] = {}
        self._random_at_epoch: dict[str, Any] = {}
        self._resumed: Checkpoint | None = None  # until the first new step of a resumed epoch
        self._resumed_step = 0
        self._replay: KerasData | None = None
        self._directory = CheckpointDirectory(self.backup_dir)
        self._writer = BackgroundWriter()
        self._copies: HostCopies | None = None
        self._has_warned = False
        self._number = 0  # of the newest checkpoint
        self._is_on_disk = True  # whether that from which the training resumed is

    @classmethod
    def from_keras(cls, callback: keras.callbacks.BackupAndRestore) -> Backup:
        """Returns the replacement of Keras' callback."""
        return cls(callback.backup_dir, callback.save_freq, callback.delete_checkpoint)

    def settings(self) -> dict[str, Any]:
        """Returns the arguments, by name."""
        names = ("backup_dir", "save_freq", "delete_checkpoint", "asynchronous", "memory_freq")
        return {name: getattr(self, name) for name in names}

    @property
    def reads_state_between_steps(self) -> bool:
        """Whether it saves within epochs."""
        return self.save_freq != "epoch" or self.memory_freq is not None

    # Saving.

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the random state of the epoch; in a resumed epoch, restores the state again."""
        self._epoch, self._last_batch = epoch, -1
        if self._resumed is None:
            self._random_at_epoch = random_state()
            if self._replay is not None:  # of earlier epochs that share their pass with this one
                self._replay.replay()
                self._replay = None
            return
        # `on_epoch_begin` of other callbacks has run twice for this epoch: it may have changed a rate again.
        self._load(self._resumed, with_rates=False)
        self._last_batch = self._resumed_step - 1
        self._random_at_epoch = self._resumed["training"]["random of epoch"]
        set_random_state(self._random_at_epoch)
        if self._replay is not None:  # not earlier: other callbacks replace `train_function` in `on_train_begin`
            self._replay.replay()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends the replay of a resumed epoch's earlier steps."""
        if self._resumed is not None and not is_replaying(self.model):
            self._set_random_state(self._resumed)
            if self._replay is not None:
                self._load(self._resumed, with_rates=False)  # replayed steps have changed the counts of other callbacks
            self._resumed = self._replay = None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves every `save_freq` steps."""
        if self._resumed is not None:
            return  # a replayed step
        steps = batch - self._last_batch
        self._steps_since += steps
        if self._copies is not None:
            self._copies.made_steps(steps)
        if self.is_chief:
            own_progress.made_steps(steps)
        self._last_batch = batch
        if self.save_freq != "epoch" and self._steps_since >= int(self.save_freq):
            self.save(batch + 1)
        elif self._copies is not None and self._copies.is_due:
            self._save_in_memory(batch + 1)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves after each epoch, or if a save was due in its last step."""
        if self._resumed is not None:  # the epoch had no steps left
            self._set_random_state(self._resumed)
            if self._replay is not None:
                self._replay.end()
            self._resumed = self._replay = None
        is_due = self.save_freq == "epoch" or self._steps_since >= int(self.save_freq)
        self._epoch, self._last_batch = epoch + 1, -1
        if is_due:
            self.save(0)
        elif self._copies is not None and self._copies.is_due:
            self._save_in_memory(0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Deletes the checkpoints."""
        set_initial_epoch(self.model, None)  # else Keras uses it in the next `fit` too
        self.wait_until_written()
        if self.is_chief and self.delete_checkpoint:
            self._directory.delete()
        self._directory.lock.release()
        if self._copies is not None:
            self._copies.delete()
        self.session.engine.barrier()  # all ranks see the deletion afterwards

    def clean_up(self) -> None:
        """Waits for a checkpoint that is being written, after an error too."""
        try:
            self.wait_until_written()
        except CheckpointError as error:
            logger.warning("%s", error)
        if self.model is not None:
            set_initial_epoch(self.model, None)  # else Keras uses it in the next `fit` too

    def save(self, epoch_step: int) -> bool:
        """Saves, and returns whether this step is saved: the last step of an epoch is saved after the epoch.

        Collective: every rank must call this, in the same order.
        """
        if self._resumed is not None:  # in a step that was trained before, which is drawn again
            if self.is_chief and not self._is_on_disk:
                self._directory.write(self._resumed)
            elif not self._is_on_disk:
                self._send(self._resumed)
            self._is_on_disk = True
            return True
        if self._is_saved_later(epoch_step):
            return False
        if self._saved_at == (self._epoch, epoch_step):
            return True
        began = time.monotonic()
        checkpoint = self._checkpoint(epoch_step)
        self._copy(checkpoint, epoch_step, began)  # before the disk, whose time is none of a copy's
        # Parts of which each rank has some are made now, by all ranks.
        is_deferred = any(isinstance(each, DeferredArray) for state in checkpoint.values() for each in state.values())
        if is_deferred and self.is_chief and self.asynchronous:
            once.warning("asynchronous=True has no effect with state in parts: all ranks send their parts in the step")
        if self.is_chief and self.asynchronous and not is_deferred:
            self._writer.write(functools.partial(self._write, self._place(epoch_step)), checkpoint)
        elif self.is_chief:
            self._write(self._place(epoch_step), checkpoint)
        else:
            self._send(checkpoint)
        if self._copies is not None:
            self._copies.begin_steps()
        self._steps_since = 0
        self._saved_at = self._epoch, epoch_step
        return True

    @staticmethod
    def _send(checkpoint: Checkpoint) -> None:
        """Sends this rank's parts of a checkpoint to the chief, which writes it."""
        send(arrays_of(checkpoint), [0])

    def wait_until_written(self) -> None:
        """Waits until what was saved is on disk; raises `CheckpointError` if it could not be written."""
        self._writer.wait()

    def _save_in_memory(self, epoch_step: int) -> None:
        if not self._is_saved_later(epoch_step):
            began = time.monotonic()
            self._copy(self._checkpoint(epoch_step), epoch_step, began)

    def _copy(self, checkpoint: Checkpoint, epoch_step: int, began: float) -> None:
        if self._copies is not None and self._copies.write(checkpoint, began) and self.is_chief:
            own_progress.saved(*self._place(epoch_step), self._number)

    def _is_saved_later(self, epoch_step: int) -> bool:
        """Returns whether this step is saved after the epoch, as its last one."""
        return bool(epoch_step) and self.session.is_last_step(epoch_step, self.params)

    def _place(self, epoch_step: int) -> tuple[int, int, int]:
        return self._epoch, epoch_step, own_progress.steps

    def _write(self, place: tuple[int, int, int], checkpoint: Checkpoint) -> None:
        logger.debug("saved %s", self._directory.write(checkpoint))
        own_progress.saved(*place, checkpoint["training"]["number"])

    def _checkpoint(self, epoch_step: int) -> Checkpoint:
        """Returns the next checkpoint.

        Collective: every rank must call this, in the same order.
        """
        session = self.session
        session.synchronize()
        # Later attempts have greater ones, those too that know of no copy on a host which is away.
        self._number = max(self._number + 1, time.time_ns() // 1_000_000)
        parts: list[StatePart] = [*session.parts(), session.data(epoch_step), CallbackState(self.others)]
        if epoch_step:
            parts.append(session.metrics)
        self._warn_of_untracked(parts)
        checkpoint = {part.name: part.state_dict() for part in parts}
        checkpoint["training"] = {
            "number": self._number,
            "epoch": self._epoch,
            "stopped": self._num_epochs if self.model.stop_training and not epoch_step else 0,
            "ranks": session.engine.size,
            "engine": session.engine.name,
            "random of fit": self._random_at_fit,
            "random of epoch": self._random_at_epoch,
            "random": random_state(),
        }
        return checkpoint

    def _warn_of_untracked(self, parts: Sequence[StatePart]) -> None:
        names = [name for part in parts if isinstance(part, ModelState) for name in part.untracked]
        if names and self.is_chief and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "this training cannot be resumed: variables that the model does not track are not saved. Received: an "
                "optimizer that updates %s. Fix: %s.", ", ".join(names), FIX_OF_UNTRACKED,
            )  # fmt: skip

    # Resuming.

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resumes an interrupted training, unless `RankSynchronization` calls `begin`."""
        self.session.check_save_frequency(self.save_freq if self.memory_freq is None else 1)
        if not self.session.begins_backups:
            self._check_built()
            self.begin()

    def begin(self) -> None:
        """Resumes the interrupted training in `backup_dir`, if there is one.

        Collective: every rank must call this, in the same order.
        """
        self._check_alone()
        self.clean_up()
        self._directory.lock.release()  # of a `fit` that raised
        self._directory = CheckpointDirectory(self.backup_dir)
        self._epoch, self._last_batch, self._steps_since, self._saved_at, self._number = 0, -1, 0, None, 0
        self._resumed = self._replay = None
        self._random_at_fit = random_state() if self.session.draws_in_background else {}
        if self.is_chief:
            self._directory.lock.acquire(job=own_reports.job)
            own_progress.fit_begins()
        in_parts = [part.name for part in self.session.parts() if isinstance(part, ModelState) and part.is_in_parts]
        found, root, name = self._newest()
        saved = broadcast_checkpoint(self.session.engine, found, root=root, one_by_one=in_parts)
        if saved is None:
            if self.is_chief:
                _warn_of_keras_backup(self.backup_dir)
            return
        self._number = saved["training"].get("number", 0)
        own_progress.fit_resumes(self._number)
        self._load(saved, with_rates=True)
        self._begin_at(saved, name)

    def _check_built(self) -> None:
        parts = [each for each in layers_of(self.model) if not isinstance(each, keras.Model)]
        makes_weights = [each for each in parts if type(each).build is not keras.layers.Layer.build]
        if not self.model.built and not all(each.built for each in makes_weights):
            raise CheckpointError(
                "BackupAndRestore needs a model that is built when fit begins: a resumed training loads its weights "
                f"then. Received: {type(self.model).__name__} {self.model.name!r} with layers that the first step "
                "would build. Expected all of its weights. Fix: begin the model with keras.Input(...), or call "
                "model.build(input_shape), or the model on a batch, before fit."
            )

    def _check_alone(self) -> None:
        directories = [each.backup_dir for each in self.siblings if isinstance(each, Backup)]
        if len(directories) > 1:
            raise CheckpointError(
                f"Two BackupAndRestore are in one fit. Received: backup_dir {', '.join(map(repr, directories))}. "
                "Expected one, as a training resumes from one checkpoint. Fix: keep one; its save_freq says how often "
                "it saves, and memory_freq how often it copies."
            )

    def _newest(self) -> tuple[Checkpoint | None, int, str]:
        """Returns the newest checkpoint on the rank that has it, and `None` on the others; that rank, and its name.

        Collective: every rank must call this, in the same order.
        """
        engine = self.session.engine
        self._copies = self._make_copies()
        found, unreadable = None, None
        try:
            found = self._directory.read() if self.is_chief else None
        except CheckpointError as error:
            unreadable = error
        path, checkpoint = (None, None) if found is None else found
        name = "" if path is None else path.name
        if self._copies is None:
            if unreadable is not None:
                raise unreadable
            return checkpoint, 0, name
        on_disk = engine.broadcast_object(0 if checkpoint is None else checkpoint["training"].get("number", 0))
        in_memory, rank = self._copies.newest()
        self._is_on_disk = in_memory <= on_disk
        if unreadable is not None and in_memory == 0:
            raise unreadable
        if self._is_on_disk:
            return checkpoint, 0, name
        return self._copies.read() if engine.rank == rank else None, rank, f"the memory of rank {rank}'s host"

    def _make_copies(self) -> HostCopies | None:
        """Returns the copies in the memory of hosts, if they are asked for and another attempt will look for them."""
        if self.memory_freq is None:
            return None
        if not own_reports.job:
            if self.is_chief:
                logger.warning(
                    "memory_freq has no effect: nothing starts this training again. Received: memory_freq=%r without "
                    "`kdist run --restarts`. Fix: kdist run -np N --restarts 3 SCRIPT.", self.memory_freq,
                )  # fmt: skip
            return None
        return HostCopies(self.session.engine, own_reports.job, self.backup_dir, self.memory_freq)

    def _load(self, saved: Checkpoint, *, with_rates: bool) -> None:
        parts: list[StatePart] = [*self.session.parts(), CallbackState(self.others)]
        for part in parts:
            if with_rates or part.name != "rates":  # a warm-up that has begun since goes on
                part.load_state_dict(saved.get(part.name, {}))

    def _begin_at(self, saved: Checkpoint, name: str) -> None:
        """Sets where the training begins, and logs it."""
        training, engine = saved["training"], self.session.engine
        epoch = training["epoch"]
        if training["stopped"] >= self._num_epochs:  # unless `fit` now has more epochs
            epoch = max(epoch, self._num_epochs)
        set_initial_epoch(self.model, epoch)
        self._random_at_fit = training["random of fit"] or self._random_at_fit
        data = self.session.data()
        data.load_state_dict(saved["data"])
        place = data.place
        self._set_random_state(saved)  # after the data's hooks, which set other states
        self._replay = data if isinstance(data, KerasData) and data.needs_replay else None
        if place.epoch_step:
            self._resumed, self._resumed_step = saved, place.epoch_step
            self.session.metrics.load_state_dict(saved.get("metrics", {}))
        if self.is_chief:
            level = logging.WARNING if engine.size == 1 else logging.INFO  # kdist logs warnings only in one process
            logger.log(level, "training resumes from %s: epoch %d, %s", name, epoch + 1, place.description)
            if training["ranks"] != engine.size:
                logger.log(
                    level, "the checkpoint was saved by %d rank(s) and is resumed by %d: %s", training["ranks"],
                    engine.size, place.change,
                )  # fmt: skip
            engines = {training["engine"], engine.name}
            if len(engines) > 1 and "single" not in engines:  # engines add in different orders
                logger.log(
                    level, "the checkpoint was saved with engine %s and is resumed with %s: sums may differ in their "
                    "last bits", training["engine"], engine.name,
                )  # fmt: skip

    @property
    def _num_epochs(self) -> int:
        return (self.params or {}).get("epochs", 1)  # a user's `CallbackList` may have none

    def _set_random_state(self, saved: Checkpoint) -> None:
        if self.session.draws_in_background:
            # The user's generator starts again, as at the beginning of `fit`.
            if saved["training"]["random of fit"]:
                set_random_state(saved["training"]["random of fit"])
            return
        set_random_state(saved["training"]["random"])


def _warn_of_keras_backup(backup_dir: str) -> None:
    weights = Path(backup_dir, "latest.weights.h5")
    if weights.exists():
        logger.warning(
            "%s has a backup of Keras' own BackupAndRestore, which kdist cannot read: training starts from the "
            "beginning. Fix: model.load_weights(%r), and fit(initial_epoch=...). kdist.callbacks.BackupAndRestore "
            "resumes trainings of one process and of several.", backup_dir, str(weights),
        )  # fmt: skip
