"""`gradient_accumulation_steps`: gradients travel once, with the update that they are for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.training import _keras_internals as internals
from kdist.training.optimizers import optimizers_of

_READ_NO_STATE = (keras.callbacks.ProgbarLogger, keras.callbacks.TensorBoard)
_READ_IT_WHEN_THEY_SAVE = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


class DeferredSums:
    """Lets each rank accumulate its own part of the gradients, in a pass over the training data.

    Meanwhile Keras' accumulators hold this rank's part of the sum. At all other times they hold the sum on every rank,
    as in one process: what is saved, compared or read there is what one process has. So where a callback may look
    between two steps, nothing is deferred.

    Args:
        model: `keras.Model`.
        engine: `Engine`, how the ranks talk to each other.

    Attributes:
        optimizer: the optimizer whose gradients travel with its updates, or `None`.
    """

    def __init__(self, model: keras.Model, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        self._is_open = False
        self.optimizer: keras.optimizers.Optimizer | None = None

    def choose(self, *, looked_at: bool) -> None:
        """Chooses the optimizer, before the training step is traced: the model's only one, if it does as Keras' do.

        Args:
            looked_at: bool, whether something may read or write the model's state between two steps, on any rank.
        """
        found = optimizers_of(self._model)
        overwritten = any(getattr(each, "overwrite_with_gradient", False) for each in self._model.trainable_variables)
        defers = len(found) == 1 and internals.accumulates_plainly(found[0]) and not (looked_at or overwritten)
        chosen = found[0] if defers else None
        if chosen is not self.optimizer:
            self._model.train_function = None
        self.optimizer, self._is_open = chosen, False

    @property
    def is_open(self) -> bool:
        """Whether the ranks' accumulators may differ."""
        return self._is_open

    def begin(self) -> None:
        """Leaves the sums that are there to rank 0."""
        self._is_open = self.optimizer is not None
        if self._engine.rank != 0:
            for each in self._accumulators():
                each.assign(tf.zeros_like(each))

    def end(self) -> None:
        """Gives the sums to all ranks.

        Collective: every rank must call this, in the same order.
        """
        self._is_open = False
        accumulators = self._accumulators()
        if accumulators:
            totals = self._engine.allreduce([tf.convert_to_tensor(each) for each in accumulators])
            for each, total in zip(accumulators, totals, strict=True):
                each.assign(total)

    def _accumulators(self) -> list[tf.Variable]:
        found = [] if self.optimizer is None else internals.accumulators(self.optimizer)
        return [each for each in found if each is not None]


def look_between_steps(callbacks: Iterable[Any]) -> bool:
    """Returns whether callbacks may read or write the model's state between two steps of an epoch.

    Args:
        callbacks: iterable of callbacks. One whose methods are called at every step and that does not look says
            `reads_state_between_steps = False`.
    """
    return any(_looks(each) for each in callbacks)


def _looks(callback: Any) -> bool:
    if type(callback) in _READ_NO_STATE or not getattr(callback, "reads_state_between_steps", True):
        return False
    if type(callback) in _READ_IT_WHEN_THEY_SAVE:
        return callback.save_freq != "epoch"
    return internals.is_called_each_step(callback)
