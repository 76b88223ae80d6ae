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


class DeferredSums:
    """Lets each rank accumulate its own part of the gradients, in a pass over the training data.

    Meanwhile Keras' accumulators hold this rank's part of the sum. At all other times they hold the sum on every rank,
    as in one process: what is saved, compared or read there is what one process has. So where a callback may look
    between two steps, nothing is deferred.

    Args:
        model: `keras.Model`.
        engine: `Engine`, how the ranks talk to each other.

    Attributes:
        optimizer: the optimizer whose gradients travel with its updates in `fit`, or `None`.
        is_open: bool, whether the ranks' accumulators may differ.
    """

    def __init__(self, model: keras.Model, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        self.optimizer: keras.optimizers.Optimizer | None = None
        self.is_open = False

    def choose(self, *, looked_at: bool) -> None:
        """Chooses the optimizer, before the training step is traced: the model's only one, if it does as Keras' do.

        Args:
            looked_at: bool, whether something may read or write the model's state between two steps, on any rank.
        """
        found = optimizers_of(self._model)
        defers = not looked_at and len(found) == 1 and internals.accumulates_plainly(found[0])
        chosen = found[0] if defers and not _sends_other_than_sums(self._model) else None
        if chosen is not self.optimizer:
            self._model.train_function = None
        self.optimizer = chosen

    def begin(self) -> None:
        """Leaves the sums that are there to rank 0."""
        self.is_open = True
        if self._engine.rank != 0:
            for each in self._accumulators():
                each.assign(tf.zeros_like(each))

    def end(self) -> None:
        """Gives the sums to all ranks.

        Collective: every rank must call this, in the same order.
        """
        self.is_open = False
        accumulators = self._accumulators()
        if accumulators and not internals.is_update_due(self.optimizer, steps=0):  # just updated: all are zeros
            totals = self._engine.allreduce([tf.convert_to_tensor(each) for each in accumulators])
            for each, total in zip(accumulators, totals, strict=True):
                each.assign(total)

    def _accumulators(self) -> list[tf.Variable]:
        found = [] if self.optimizer is None else internals.accumulators(self.optimizer)
        return [each for each in found if each is not None]


def _sends_other_than_sums(model: keras.Model) -> bool:
    """Returns whether some gradients are better sent as they come: an embedding's few rows, a float8 layer's maxima."""
    is_sparse = any(isinstance(each, keras.layers.Embedding) and each.trainable for each in model._flatten_layers())
    return is_sparse or any(getattr(each, "overwrite_with_gradient", False) for each in model.trainable_variables)


def look_between_steps(callbacks: Iterable[Any]) -> bool:
    """Returns whether callbacks may read or write the model's state between two steps of an epoch.

    Args:
        callbacks: iterable of callbacks. An attribute `reads_state_between_steps` of a callback's own decides for it;
            without one, whether it is called at every step.
    """
    return any(_looks(each) for each in callbacks)


def _looks(callback: Any) -> bool:
    says = getattr(callback, "reads_state_between_steps", None)
    if says is not None:
        return bool(says)
    if type(callback) is keras.callbacks.ModelCheckpoint:
        return callback.save_freq != "epoch"
    return type(callback) not in _READ_NO_STATE and internals.is_called_each_step(callback)
