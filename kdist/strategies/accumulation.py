"""Gradient accumulation (`gradient_accumulation_steps`): gradients are reduced once per update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.keras_hooks.fit.callbacks import is_called_each_step
from kdist.keras_hooks.optimizers import accumulates_as_keras, accumulators, is_update_due, optimizers_of
from kdist.keras_hooks.trainer import layers_of

_READ_NO_STATE = (keras.callbacks.ProgbarLogger, keras.callbacks.TensorBoard)


class LocalAccumulation:
    """Accumulates each rank's gradients locally, in a pass over the training data.

    During the pass Keras' accumulators hold this rank's part of the sum. At all other times they hold the sum on every
    rank, as in one process. So gradients are reduced in each step if a callback may read the state between two steps.

    Attributes:
        optimizer: the optimizer whose gradients are reduced once per update in `fit`, or `None`.
        is_open: bool, whether the ranks' accumulators may differ.
    """

    def __init__(self, model: keras.Model, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        self.optimizer: keras.optimizers.Optimizer | None = None
        self.is_open = False

    def choose(self, *, state_is_read: bool) -> None:
        """Chooses the optimizer before the step is traced: the model's only one, if it accumulates as Keras."""
        found = optimizers_of(self._model)
        defers = not state_is_read and len(found) == 1 and accumulates_as_keras(found[0])
        chosen = found[0] if defers and not _has_special_gradients(self._model) else None
        if chosen is not self.optimizer:
            self._model.train_function = None
        self.optimizer = chosen

    def begin(self) -> None:
        """Leaves the accumulated sums to rank 0."""
        self.is_open = True
        if self._engine.rank != 0:
            for each in self._accumulators():
                each.assign(tf.zeros_like(each))

    def end(self) -> None:
        """Sums the accumulators over the ranks.

        Collective: every rank must call this, in the same order.
        """
        self.is_open = False
        accumulators = self._accumulators()
        if accumulators and not is_update_due(self.optimizer, steps=0):  # after an update all are zero
            totals = self._engine.allreduce([tf.convert_to_tensor(each) for each in accumulators])
            for each, total in zip(accumulators, totals, strict=True):
                each.assign(total)

    def _accumulators(self) -> list[tf.Variable]:
        found = [] if self.optimizer is None else accumulators(self.optimizer)
        return [each for each in found if each is not None]


def _has_special_gradients(model: keras.Model) -> bool:
    """Returns whether a model has sparse gradients (embeddings), or gradients that are not summed (float8 layers)."""
    is_sparse = any(isinstance(each, keras.layers.Embedding) and each.trainable for each in layers_of(model))
    return is_sparse or any(getattr(each, "overwrite_with_gradient", False) for each in model.trainable_variables)


def read_state_between_steps(callbacks: Iterable[Any], prefixes: Sequence[str] = ("", "train_")) -> bool:
    """Returns whether callbacks may read or write the model's state between two steps, of training by default.

    A callback's attribute `reads_state_between_steps` decides; without one, whether it is called at each step.
    """
    return any(_reads_state(each, prefixes) for each in callbacks)


def _reads_state(callback: Any, prefixes: Sequence[str]) -> bool:
    declared, is_training = getattr(callback, "reads_state_between_steps", None), "train_" in prefixes
    if declared is not None and (is_training or not declared):
        return bool(declared)
    if type(callback) is keras.callbacks.ModelCheckpoint:
        return is_training and callback.save_freq != "epoch"
    return type(callback) not in _READ_NO_STATE and is_called_each_step(callback, prefixes)
