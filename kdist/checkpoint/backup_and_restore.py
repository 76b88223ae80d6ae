"""Backup and resume: saves a training between two steps or epochs, and resumes it there."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import time
from typing import Any, Literal

import keras

from kdist.checkpoint import refusals
from kdist.checkpoint.all_ranks_callback import AllRanksCallback
from kdist.checkpoint.callback_state import CallbackState
from kdist.checkpoint.storage.broadcast import broadcast_checkpoint
from kdist.checkpoint.storage.files import Checkpoint
from kdist.checkpoint.storage.storage import CheckpointStorage, checkpoint_number
from kdist.errors import CheckpointError
from kdist.keras_hooks.trainer import set_initial_epoch
from kdist.restarts.progress import own_progress
from kdist.state.part import StatePart
from kdist.state.random_state import random_state, set_random_state
from kdist.state.single_process import KerasData, is_replaying

logger = logging.getLogger("kdist")


class BackupAndRestore(AllRanksCallback):
    """Saves the state of a training, and resumes an interrupted training there, within an epoch too.

    The same script is started again. A checkpoint contains weights, optimizers, the position in the data, random states
    (seed generators, Python, NumPy), metrics within an epoch, `History`, and the state of Keras' callbacks
    (`EarlyStopping`, `ReduceLROnPlateau`, `ModelCheckpoint`, `SwapEMAWeights`, `TensorBoard`). It is a directory that
    is renamed when it is complete; the previous one is kept, and used if the newest cannot be read.

    In `kdist.scope()` of several ranks the chief writes and reads; the others need no access to its disk. Arrays,
    `PyDataset` and `tf.data` resume exactly, with or without seeds of their shuffles: with
    `tf.config.experimental.enable_op_determinism` the final weights are equal bit for bit to those of an uninterrupted
    training. Another number of ranks may resume: batch, learning rate and position are converted. In one process, where
    Keras iterates the data, the batches of earlier steps are drawn again and skipped. A generator is read from its
    beginning. The log describes what is done.

    It runs on all ranks, and may be given on one of them only.

    Keras' own `BackupAndRestore`, given to `fit` in a scope of several ranks, does the same.

    With `asynchronous=True` a step waits until the state has been copied, not until it is written; state of which each
    rank has a part is written before training goes on. With `memory_freq`, each host also keeps the newest two
    checkpoints in its memory (`/dev/shm`), and `kdist run --restarts` resumes from the newest of all, on the hosts that
    are left. So few steps are lost, the chief's host may be lost with its disk, and the disk is written seldom.

    Args:
        backup_dir: str or path, a directory for this training only. While another process uses it, this one waits up
            to 30 seconds.
        save_freq: `"epoch"`, or an int: the steps of the job between two saves, which do not grow with its ranks.
        double_checkpoint: bool, as in Keras; the previous checkpoint is always kept.
        delete_checkpoint: bool, whether the checkpoints are deleted at the end of `fit`.
        asynchronous: bool, whether training goes on while the chief writes, at a lower priority. Until `fit` ends it
            takes memory for a copy that is being written and one that waits; where saves come faster than they are
            written, the newest one waits, and those between are left out.
        memory_freq: int, the steps between two copies in the memory of each host; `"auto"`, so that they take 1 % of
            the time at most; or `None` for none.

    Raises:
        ScopeError: when training begins, if workers of parameter servers would save between two steps.
        CheckpointError: if an argument is invalid; when training begins, if no checkpoint can be read, or it is another
            model's, or if one process trains a model that is not built; when one cannot be written.

    Example:
    ```python
    model.fit(x, y, epochs=10, callbacks=[kdist.callbacks.BackupAndRestore("backup", save_freq=500)])
    ```
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Literal["epoch"] | int = "epoch",
        double_checkpoint: bool = True,
        delete_checkpoint: bool = True,
        asynchronous: bool = False,
        memory_freq: int | Literal["auto"] | None = None,
    ) -> None:
        super().__init__()
        refusals.check_arguments(backup_dir, save_freq, asynchronous, memory_freq)
        self.backup_dir = os.fspath(backup_dir)
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
        self._storage = CheckpointStorage(self.backup_dir)
        self._has_warned = False
        self._number = 0  # of the newest checkpoint
        self._found: tuple[Checkpoint | None, str] | None = None  # by `before_user_callbacks`
        self.is_kept = False  # whether the checkpoints of a `fit` that has ended stay, for all ranks leave

    @classmethod
    def from_keras(cls, callback: keras.callbacks.BackupAndRestore) -> BackupAndRestore:
        """Returns the replacement of Keras' callback, which takes a `save_freq` of 0, too."""
        save_freq = callback.save_freq if callback.save_freq == "epoch" else max(1, callback.save_freq)
        return cls(callback.backup_dir, save_freq, delete_checkpoint=callback.delete_checkpoint)

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
        self._storage.made_steps(steps)
        if self.is_chief:
            own_progress.made_steps(steps)
        self._last_batch = batch
        if self.save_freq != "epoch" and self._steps_since >= int(self.save_freq):
            self.save(batch + 1)
        elif self._storage.copy_is_due:
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
        elif self._storage.copy_is_due:
            self._save_in_memory(0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Deletes the checkpoints, unless all ranks leave now to go on from them."""
        self.is_kept = any(each.exits for each in self.siblings)
        if self.is_kept:
            return
        set_initial_epoch(self.model, None)  # else Keras uses it in the next `fit` too
        self._storage.end(delete=self.delete_checkpoint)
        if self.delete_checkpoint:
            own_progress.fit_ends(self.backup_dir, is_chief=self.is_chief)
            if self.is_chief:
                with contextlib.suppress(OSError):  # it is gone, or has another call's directory in it
                    os.rmdir(self.backup_dir)
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
            self._storage.write_found(self._resumed)
            return True
        if self._is_saved_later(epoch_step):
            return False
        if self._saved_at == (self._epoch, epoch_step):
            return True
        began = time.monotonic()
        self._storage.write(self._checkpoint(epoch_step), (self._epoch, epoch_step), began)
        self._steps_since = 0
        self._saved_at = self._epoch, epoch_step
        return True

    def wait_until_written(self) -> None:
        """Waits until what was saved is on disk; raises `CheckpointError` if it could not be written."""
        self._storage.wait()

    def _save_in_memory(self, epoch_step: int) -> None:
        if not self._is_saved_later(epoch_step):
            began = time.monotonic()
            self._storage.copy(self._checkpoint(epoch_step), (self._epoch, epoch_step), began)

    def _is_saved_later(self, epoch_step: int) -> bool:
        """Returns whether this step is saved after the epoch, as its last one."""
        return bool(epoch_step) and self.session.is_last_step(epoch_step, self.params)

    def _checkpoint(self, epoch_step: int) -> Checkpoint:
        """Returns the next checkpoint.

        Collective: every rank must call this, in the same order.
        """
        session = self.session
        session.synchronize()
        # Later attempts have greater ones, those too that know of no copy on a host which is away.
        self._number = max(self._number + 1, time.time_ns() // 1_000_000)
        parts = [*self._parts(), session.data(epoch_step), *([session.metrics] if epoch_step else [])]
        if self.is_chief and not self._has_warned:
            self._has_warned = refusals.warn_of_untracked(parts)
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

    def _parts(self) -> list[StatePart]:
        """Returns the parts of the state between two epochs, but for the place in the data."""
        return [*self.session.parts(), CallbackState(self.others)]

    # Resuming.

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resumes an interrupted training, unless `RankSynchronization` calls `begin`."""
        self.session.check_save_frequency(self.save_freq if self.memory_freq is None else 1)
        if not self.session.begins_backups:
            refusals.check_built(self.model)
            self.begin()

    def before_user_callbacks(self) -> None:
        """Loads the interrupted training in `backup_dir`, if there is one, for callbacks that look at the model.

        Collective: every rank must call this, in the same order.
        """
        if not self.session.begins_backups:
            refusals.check_built(self.model)
        self._found = self._find()
        saved, _ = self._found
        if saved is not None:
            self._load(saved, with_rates=True)

    def begin(self) -> None:
        """Resumes the interrupted training in `backup_dir`, if there is one.

        Collective: every rank must call this, in the same order.
        """
        (saved, name), self._found = self._find() if self._found is None else self._found, None
        if saved is not None:
            self._load(saved, with_rates=True)  # again, where a callback has begun: the checkpoint is right
            self._begin_at(saved, name)

    def _find(self) -> tuple[Checkpoint | None, str]:
        """Returns the newest checkpoint of this call on all ranks, or `None`, and its name.

        Collective: every rank must call this, in the same order.
        """
        refusals.check_alone([each.backup_dir for each in self.siblings if isinstance(each, BackupAndRestore)])
        self.clean_up()
        self._storage.unlock()  # of a `fit` that raised
        self._storage = CheckpointStorage(self._directory_of_fit())
        self._epoch, self._last_batch, self._steps_since, self._saved_at, self._number = 0, -1, 0, None, 0
        self._resumed = self._replay = None
        self._random_at_fit = random_state() if self.session.draws_in_background else {}
        self._storage.open(self.session.engine, asynchronous=self.asynchronous, memory_freq=self.memory_freq)
        if self.is_chief:
            own_progress.fit_begins()
        in_parts = [part.name for part in self._parts() if part.is_in_parts]
        found, root, name = self._storage.newest()
        saved = broadcast_checkpoint(self.session.engine, found, root=root, one_by_one=in_parts)
        if saved is None:
            if self.is_chief:
                refusals.warn_of_keras_backup(self.backup_dir)
            return None, name
        if own_progress.ended_fits(self.backup_dir) and self.session.data().is_of_other_data(saved["data"]):
            if self.is_chief:
                logger.warning(
                    "%s in %s is not used: it is of a call of `fit` on other data, as where a script leaves out calls "
                    "that had ended. This call starts from its first epoch. Fix: give each call its own `backup_dir`.",
                    name,
                    self._directory_of_fit(),
                )
            return None, name
        self._number = checkpoint_number(saved)
        own_progress.fit_resumes(self._number)
        return saved, name

    def _directory_of_fit(self) -> str:
        """Returns the directory of this call of `fit`: a script that begins again must not take a later one's."""
        ended = own_progress.ended_fits(self.backup_dir)
        return os.path.join(self.backup_dir, f"fit-{ended + 1}") if ended else self.backup_dir

    def _load(self, saved: Checkpoint, *, with_rates: bool) -> None:
        for part in self._parts():
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
        # A user's `CallbackList` may have none, and the user's own number may be NumPy's.
        return operator.index((self.params or {}).get("epochs", 1))

    def _set_random_state(self, saved: Checkpoint) -> None:
        if self.session.draws_in_background:
            # The user's generator starts again, as at the beginning of `fit`.
            if saved["training"]["random of fit"]:
                set_random_state(saved["training"]["random of fit"])
            return
        set_random_state(saved["training"]["random"])
