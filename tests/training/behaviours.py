"""What the modules of behaviours share: how the ranks compare notes, and a model that says which rows it trained on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import kdist
from kdist._engine import open_engine


def everyone(value: Any) -> list[Any]:
    """Returns what each rank says, in rank order."""
    return open_engine(kdist.cluster_info()).gather_objects(value)


def assert_equal_everywhere(value: Any) -> Any:
    """Asserts that all ranks say the same, and returns it."""
    said = everyone(value)
    assert all(each == said[0] for each in said), said
    return said[0]


def weights_of(model: keras.Model) -> list[Any]:
    return [np.asarray(v).tolist() for v in model.weights]


@contextlib.contextmanager
def no_strategy_in_environment() -> Iterator[None]:
    """A context without the variable by which a job says its engine, which another strategy would contradict."""
    with mock.patch.dict(os.environ):
        os.environ.pop("KDIST_STRATEGY", None)
        yield


class Recorder(keras.Model):
    """One weight; trains on rows that are their own numbers, and notes which of them count on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")
        self.compile("sgd", "mse")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> Any:
        self._note(data)
        return super().train_step(data)

    def test_step(self, data: Any) -> Any:
        self._note(data)
        return super().test_step(data)

    def _note(self, data: Any) -> None:
        step = getattr(tf.distribute.get_strategy().extended, "step", None)
        active = tf.constant(True) if step is None else step.active

        def note(rows: Any, counts: Any) -> Any:
            if counts:
                self.seen.append([int(row) for row in np.ravel(rows)])
            return np.int32(0)

        tf.numpy_function(note, [data[0], active], tf.int32)

    def take_seen(self) -> list[list[int]]:
        """Returns the rows of each step since the last call."""
        seen, self.seen = self.seen, []
        return seen


class SeenOfEachEpoch(keras.callbacks.Callback):
    """Collects what a `Recorder` saw, a list of batches an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[list[list[int]]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(self.model.take_seen())
