"""Saves a training between two steps, and takes it up where it was interrupted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kdist.errors import CheckpointError, ScopeError
from kdist.training import callback_state, replay, snapshot, state
from kdist.training.checkpoint_files import Checkpoint, CheckpointFolder
from kdist.training.job_wide import JobWide

logger = logging.getLogger("kdist")

_KEPT = "kept/"  # before the names of what is kept from step to step beside the model


class Backup(JobWide):
    """What `kdist.callbacks.BackupAndRestore` does, and what stands for Keras' own in a scope of several ranks.

    Args:
        backup_dir: str or path, the directory of this training's checkpoints.
        save_freq: `"epoch"`, or after how many steps of the job to save.
        delete_checkpoint: bool, whether the checkpoints are deleted when training has ended.
    """

    def __init__(self, backup_dir: str, save_freq: str | int = "epoch", delete_checkpoint: bool = True) -> None:
        super().__init__()
        self.backup_dir = str(backup_dir)
        if "://" in self.backup_dir:
            raise CheckpointError(
                "A checkpoint is a directory that is renamed when it is whole. Received: "
                f"backup_dir={self.backup_dir!r}, which no file system shows. Expected a path. Fix: mount it, or "
                "give a path of this host, and copy what lies there before the training and after it."
            )
        self.save_freq = save_freq
        self.delete_checkpoint = delete_checkpoint
        self._epoch = 0
        self._steps_since = 0
        self._last_batch = -1
        self._saved_at: tuple[int, int] | None = None
        self._random_of_fit: dict[str, Any] = {}
        self._random_of_epoch: dict[str, Any] = {}
        self._resumed: Checkpoint | None = None  # within an epoch, until its first step
        self._resumed_step = 0
        self._folder = CheckpointFolder(self.backup_dir)

    @classmethod
    def of_keras(cls, callback: keras.callbacks.BackupAndRestore) -> Backup:
        """Returns what stands for Keras' own callback."""
        return cls(callback.backup_dir, callback.save_freq, callback.delete_checkpoint)

    def settings(self) -> dict[str, Any]:
        """Returns the arguments, by name."""
        names = ("backup_dir", "save_freq", "delete_checkpoint")
        return {name: getattr(self, name) for name in names}

    @property
    def reads_state_between_steps(self) -> bool:
        """Whether it saves at other times than between epochs."""
        return self.save_freq != "epoch"

    # Saving.

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes what the order of an epoch's data may follow; undoes what callbacks did for the second time."""
        self._epoch, self._last_batch = epoch, -1
        if self._resumed is not None:
            # `on_epoch_begin` of the others has run before the interruption: a rate may have been changed by it.
            self._give(self._resumed)
            self._last_batch = self._resumed_step - 1
            self._random_of_epoch = self._resumed.state["random of epoch"]
            state.set_random_state(self._random_of_epoch)
            if self.owner is None:  # not before: other callbacks have the step traced anew as training begins
                replay.pass_over(self.model, self._resumed)
        else:
            self._random_of_epoch = state.random_state()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends taking up: what was drawn to get here is drawn."""
        if self._resumed is not None and not replay.is_passing_over(self.model):
            self._put_random_state(self._resumed)
            if self.owner is None:
                self._give(self._resumed)  # the others' counts, which went on while steps were passed over
            self._resumed = None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves after every `save_freq` steps."""
        if self._resumed is not None:
            return  # one of the steps that are passed over
        self._steps_since += batch - self._last_batch
        self._last_batch = batch
        if self.save_freq != "epoch" and self._steps_since >= int(self.save_freq):
            self.save(batch + 1)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves after every epoch, and what was due in its last step."""
        if self._resumed is not None:  # no step of the epoch was left
            self._put_random_state(self._resumed)
            self._resumed = None
        is_due = self.save_freq == "epoch" or self._steps_since >= int(self.save_freq)
        self._epoch, self._last_batch = epoch + 1, -1
        if is_due:
            self.save(0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Deletes what training does not need any more."""
        self.model._initial_epoch = None  # Keras would begin the next `fit` there too
        if self.is_chief and self.delete_checkpoint:
            self._folder.delete()
        self._folder.claim.release()
        if self.owner is not None:
            self.owner.engine.barrier()  # whoever looks now finds it deleted

    def save(self, epoch_step: int) -> bool:
        """Saves, unless that has been done here, or the epoch is about to end, after which it will be.

        Collective: every rank must call this, in the same order.

        Args:
            epoch_step: int, the steps that the current epoch has made; 0 between epochs.

        Returns:
            Whether this place is saved.
        """
        if epoch_step and replay.is_last(self.owner, self.params, epoch_step):
            return False
        if self._saved_at == (self._epoch, epoch_step):
            return True
        kept = {} if self.owner is None else self.owner.take_kept()  # before all else: ranks may be apart until then
        model = snapshot.take_model(self.model)
        shares = self._shares() if epoch_step else []
        if self.is_chief:
            remembered, arrays = callback_state.take(self.others)
            everything = {
                **model.state,
                "epoch": self._epoch,
                "stopped": self._num_epochs if self.model.stop_training and not epoch_step else 0,
                "ranks": 1 if self.owner is None else self.owner.engine.size,
                "engine": None if self.owner is None else self.owner.engine.name,
                "position": None if self.owner is None else self.owner.data.training.position(epoch_step).asdict(),
                "epoch step": epoch_step,
                "callbacks": remembered,
                "rates": None if self.owner is None else [rate.progress() for rate in self.owner.rates()],
                "random of fit": self._random_of_fit,
                "random of epoch": self._random_of_epoch,
                "random": state.random_state(),
            }
            hooks, hook_arrays = replay.hooks_of(self.owner, epoch_step)
            metrics = {f"metric/{place}": share for place, share in enumerate(shares)}
            kept = {f"{_KEPT}{name}": array for name, array in kept.items()}
            arrays = {**model.arrays, **arrays, **metrics, **hook_arrays, **kept}
            path = self._folder.write(Checkpoint({**everything, "hooks": hooks}, arrays))
            logger.debug("saved %s", path)
        self._steps_since = 0
        self._saved_at = self._epoch, epoch_step
        return True

    def _shares(self) -> list[Any]:
        if self.owner is not None:
            return self.owner.metrics.shares()
        return [np.asarray(variable)[np.newaxis] for variable in self.model.metrics_variables]

    # Taking up.

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Takes up an interrupted training; among several ranks kdist calls `begin` when it is time."""
        if self.save_freq != "epoch" and hasattr(self.model.__dict__.get("_kdist"), "dispatcher"):
            raise ScopeError(
                "With parameter servers steps are under way whenever one ends. Received: "
                f"save_freq={self.save_freq!r}. Expected 'epoch', after which none is. Fix: leave save_freq out."
            )
        if self.owner is None:
            self.begin()

    def begin(self) -> None:
        """Takes up the interrupted training in `backup_dir`, if there is one.

        Collective: every rank must call this, in the same order.
        """
        self._folder.claim.release()  # of a training that was interrupted
        self._folder = CheckpointFolder(self.backup_dir)
        self._epoch, self._last_batch, self._steps_since, self._saved_at = 0, -1, 0, None
        self._resumed = None
        self._random_of_fit = state.random_state() if replay.draws_in_background(self.owner) else {}
        if self.is_chief:
            self._folder.claim.take()
        found = self._folder.read() if self.is_chief else None
        saved = found[1] if found is not None else None
        if self.owner is not None:
            saved = snapshot.same_everywhere(self.owner.engine, saved)
        if saved is None:
            if self.is_chief:
                _warn_of_keras_own(self.backup_dir)
            return
        self._give(saved)
        self._begin_at(saved, found[0].name if found is not None else "")

    def _give(self, saved: Checkpoint) -> None:
        snapshot.give_model(self.model, saved)
        callback_state.give(self.others, saved.state["callbacks"], dict(saved.arrays))
        if self.owner is not None:
            kept = {name: array for name, array in saved.arrays.items() if name.startswith(_KEPT)}
            self.owner.give_kept({name.removeprefix(_KEPT): array for name, array in kept.items()})

    def _begin_at(self, saved: Checkpoint, name: str) -> None:
        """Sets where to begin, and says so."""
        epoch, ranks = saved.state["epoch"], saved.state["ranks"]
        now = 1 if self.owner is None else self.owner.engine.size
        if saved.state["stopped"] >= self._num_epochs:  # more epochs than it was stopped in are another wish
            epoch = max(epoch, self._num_epochs)
        self.model._initial_epoch = epoch
        self._random_of_fit = saved.state["random of fit"] or self._random_of_fit
        place = replay.begin(self.model, self.owner, saved)
        self._put_random_state(saved)  # after the hooks of the user's data, which follow those of their time
        if place.epoch_step:
            self._resumed, self._resumed_step = saved, place.epoch_step
        if self.is_chief:
            # In one process nothing shows what kdist logs but warnings.
            level = logging.WARNING if self.owner is None else logging.INFO
            logger.log(level, "training goes on from %s: epoch %d, %s", name, epoch + 1, place.description)
            if ranks != now:
                logger.log(
                    level, "it was saved by %d rank(s), and %d go on: the batch, the learning rate and the place in "
                    "the data follow the new number. %s", ranks, now, place.change,
                )  # fmt: skip
            # Which gradients travel together, and so in what order they are added, is derived anew by each engine.
            before, engine = saved.state.get("engine"), None if self.owner is None else self.owner.engine.name
            if before and engine and before != engine:
                logger.log(
                    level, "it was saved over %s, and goes on over %s: sums may differ in their last bits",
                    before, engine,
                )  # fmt: skip

    @property
    def _num_epochs(self) -> int:
        return (self.params or {}).get("epochs", 1)  # a `CallbackList` of the user's may have told nothing

    def _put_random_state(self, saved: Checkpoint) -> None:
        if replay.draws_in_background(self.owner):
            # The user's generator begins anew, and draws in its own thread: as it did when training began.
            if saved.state["random of fit"]:
                state.set_random_state(saved.state["random of fit"])
            return
        state.set_random_state(saved.state["random"])


def _warn_of_keras_own(backup_dir: str) -> None:
    weights = Path(backup_dir, "latest.weights.h5")
    if weights.exists():
        logger.warning(
            "%s has a backup in Keras' own form, of one process, which is not read here: training begins anew. "
            "Fix: model.load_weights(%r), and fit(initial_epoch=...). kdist.callbacks.BackupAndRestore takes up what "
            "one process or several have saved.", backup_dir, str(weights),
        )  # fmt: skip
