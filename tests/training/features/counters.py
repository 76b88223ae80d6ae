"""Counters of rows and of steps that a step adds to in other ways than by `assign_add` of a whole integer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tests.training.features.registry import feature
from tests.training.features.states import warned
from tests.training.fidelity import BATCH, both, deterministic_weights, fed, fit_alone, rows

PART = np.array([False, True, False])


def at_one(values: Any) -> Any:
    return tf.IndexedSlices(values, tf.constant([1]))


ADDITIONS: dict[str, Callable[[Any, Any], Any]] = {
    "slice": lambda kept, n: kept[1].assign(kept[1] + n),
    "slice of several": lambda kept, n: kept[1:].assign(kept[1:] + tf.stack([n, 2 * n])),
    "tensor_scatter": lambda kept, n: kept.assign(tf.tensor_scatter_nd_add(kept, [[1]], [n])),
    "tensor_update": lambda kept, n: kept.assign(tf.tensor_scatter_nd_update(kept, [[1]], [kept[1] + n])),
    "scatter_add": lambda kept, n: kept.scatter_add(at_one(tf.stack([n]))),
    "scatter_nd_add": lambda kept, n: kept.scatter_nd_add([[1]], tf.stack([n])),
    "scatter_update": lambda kept, n: kept.scatter_update(at_one(tf.stack([kept[1] + n]))),
    "scatter_nd_update": lambda kept, n: kept.scatter_nd_update([[1]], tf.stack([kept[1] + n])),
    "where": lambda kept, n: kept.assign(tf.where(PART, kept + n, kept)),
    "concat": lambda kept, n: kept.assign(tf.concat([kept[:1], kept[1:2] + n, kept[2:]], 0)),
    "list": lambda kept, n: kept.assign_add([0, n, 0]),
    "one_hot": lambda kept, n: kept.assign_add(tf.one_hot(1, 3, n, tf.zeros_like(n))),
    "one_hot times": lambda kept, n: kept.assign_add(tf.one_hot(1, 3, dtype=n.dtype) * n),
    "slice_update": lambda kept, n: kept.assign(ops.slice_update(kept, [1], tf.stack([kept[1] + n]))),
}
LENGTHS: dict[str, Callable[[Any], Any]] = {
    "tf": lambda x: tf.shape(x, tf.int64)[0],
    "keras": lambda x: ops.cast(ops.shape(x)[0], "int64"),
    "Python": lambda x: tf.constant(x.shape[0], "int64"),
}


class CountsInParts(keras.layers.Layer):
    """Counts rows and steps in one element of three, in each of these ways."""

    def __init__(self, length: str) -> None:
        super().__init__()
        self.length = LENGTHS[length]
        names = [f"{kind} {name}" for name in ADDITIONS for kind in ("rows", "steps")]
        self.kept = {name: tf.Variable(np.zeros(3, "int64"), trainable=False) for name in names}

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            for name, add in ADDITIONS.items():
                add(self.kept[f"rows {name}"], self.length(x))
                add(self.kept[f"steps {name}"], tf.constant(1, "int64"))
        return x


@feature
def counters_in_parts_of_variables() -> None:
    """Where the number of rows is a constant of the graph, and where it is not."""

    def script(shape: str, length: str) -> Callable[[int], dict[str, Any]]:
        x, y = rows(shape)

        def run(batch: int) -> dict[str, Any]:
            layer = CountsInParts(length)
            model = keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(2)])
            model.compile(keras.optimizers.SGD(0.01), "mse")
            model.fit(**fed("arrays", (x, y), batch), verbose=0)
            return {name: each.numpy() for name, each in layer.kept.items()}

        return run

    with warned() as said:
        for length in LENGTHS:
            both(script("even", length))
        both(script("ragged", "tf"))
    assert not said, said


class AddsConstants(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        names = ("steps", "fraction", "penalty", "grown")
        self.kept = {name: self.add_weight(dtype="float64", trainable=False, name=name) for name in names}
        self.several = tf.Variable([0, 0, 0], trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.kept["steps"].assign_add(1.0)
            self.kept["fraction"].assign_add(0.25)
            self.kept["penalty"].assign_add(12.0 * BATCH)  # a multiple of the number of rows
            self.kept["grown"].assign_add(BATCH * ops.tanh(self.kept["steps"].value))
            self.several.assign_add([1, 2, 12 * BATCH])
        return x


@feature
def constants_that_each_step_adds() -> None:
    """They depend on no row, and are added once."""

    def script(shape: str) -> Callable[[int], dict[str, Any]]:
        x, y = rows(shape)

        def run(batch: int) -> dict[str, Any]:
            layer = AddsConstants()
            model = keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(2)])
            model.compile(keras.optimizers.SGD(0.01), "mse")
            model.fit(**fed("arrays", (x, y), batch), verbose=0)
            return {"several": layer.several.numpy(), **{name: each.numpy() for name, each in layer.kept.items()}}

        return run

    with warned() as said:
        both(script("even"))
        both(script("ragged"))
    assert not said, said


@feature
def a_counter_behind_a_deep_network() -> None:
    """What it counts depends on all layers before it, each of which uses its input twice."""
    x, y = rows("even")

    class Counts(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.hits = self.add_weight(shape=(3,), dtype="int32", trainable=False, initializer="zeros")

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                number = ops.sum(ops.cast(x[:, 0] > 0, "int32"))
                self.hits.assign(ops.where(PART, self.hits + number, self.hits))
            return x

    def script(batch: int) -> dict[str, Any]:
        inputs = hidden = keras.Input((5,))
        for _ in range(12):
            hidden = keras.layers.LayerNormalization()(hidden + keras.layers.Dense(5, "tanh")(hidden))
        counting = Counts()
        model = keras.Model(inputs, keras.layers.Dense(2)(counting(hidden)))
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.01), "mse")
        model.fit(**fed("arrays", (x, y), batch), verbose=0)
        return {"hits": counting.hits.numpy()}

    both(script)


@feature
def integers_that_are_not_added_to() -> None:
    """What looks like a sum for some values only, as a count up to a limit, is computed from the rows of all ranks."""
    limited: dict[str, Callable[[Any, Any], Any]] = {
        "maximum": ops.maximum,
        "remainder": lambda kept, n: (kept + n) % 7,
        "absolute": lambda kept, n: -ops.abs(kept) + n,
        "chosen": lambda kept, n: ops.where(n > 1, n, kept),
        "raised": lambda kept, n: ops.where(n > kept + 3, n, kept),
        "replaced": lambda kept, n: kept + (n - kept),
        "reset": lambda kept, n: ops.where(n > 1, kept + 1, ops.where(n % 2 == 0, 0, kept)),
    }

    class Keeps(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.kept = {
                name: self.add_weight(shape=(2,), dtype="int32", trainable=False, initializer="zeros", name=name)
                for name in limited
            }
            self.peak = self.add_weight(dtype="int32", trainable=False, initializer="zeros", name="peak")

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                num = ops.sum(ops.cast(x[:, 0] > 0, "int32"))
                for name, update in limited.items():
                    self.kept[name].assign(update(self.kept[name].value, num))
                self.peak.assign_add(ops.maximum(num - self.peak.value, 0))
            return x

    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential([keras.Input((5,)), Keeps(), keras.layers.Dense(2)])
        deterministic_weights(model.layers[-1])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return fit_alone(model, fed("arrays", (x, y), batch))

    with warned() as said:
        both(script)
    assert not said, said
