"""Sparse gradients' rows of one index are added up once, in order, before a kernel of a GPU could add them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.strategies.ordered_sums import ordered_sums, with_single_rows

ROWS, WIDTH = 5, 2
IDS = [3, 1, 3, 3, 0, 1]
OPTIMIZERS: list[Callable[[], keras.optimizers.Optimizer]] = [
    lambda: keras.optimizers.SGD(0.1),
    lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    keras.optimizers.Adam,
    lambda: keras.optimizers.Adam(amsgrad=True),
    keras.optimizers.RMSprop,
    lambda: keras.optimizers.Adagrad(0.1),
    keras.optimizers.Adadelta,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    keras.optimizers.Lamb,
    lambda: keras.optimizers.AdamW(use_ema=True),
]


def slices() -> tf.IndexedSlices:
    values = tf.constant(np.random.default_rng(0).normal(size=(len(IDS), WIDTH)))
    return tf.IndexedSlices(values, tf.constant(IDS), tf.constant([ROWS, WIDTH]))


def test_rows_of_one_index_are_one_row() -> None:
    given = slices()
    single = with_single_rows(given)
    assert single.indices.numpy().tolist() == [3, 1, 0]
    np.testing.assert_allclose(tf.convert_to_tensor(single), tf.convert_to_tensor(given), rtol=1e-15)
    none = with_single_rows(tf.IndexedSlices(given.values[:0], given.indices[:0], given.dense_shape))
    assert (none.values.shape, none.indices.shape) == ((0, WIDTH), (0,))


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("is_graph", [True, False])
def test_updates_are_those_of_plain_keras(make: Callable[[], keras.optimizers.Optimizer], is_graph: bool) -> None:
    def trained(is_ordered: bool) -> list[Any]:
        weight = keras.Variable(np.ones((ROWS, WIDTH)), dtype="float64")
        optimizer = make()
        optimizer.build([weight])

        def update() -> None:
            optimizer.apply([slices()], [weight])

        def ordered() -> None:
            with ordered_sums():
                update()

        step = ordered if is_ordered else update
        step = tf.function(step) if is_graph else step
        for _ in range(3):
            step()
        return [each.numpy() for each in [weight, *optimizer.variables]]

    for expected, found in zip(trained(False), trained(True), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)  # optimizers hold some settings in float32


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_no_kernel_gets_two_rows_of_one_index(make: Callable[[], keras.optimizers.Optimizer]) -> None:
    """Where the variables are decides where a kernel runs: on a GPU it adds such rows in no fixed order."""
    weight = keras.Variable(np.ones((ROWS, WIDTH)), dtype="float64")
    optimizer = make()
    optimizer.build([weight])

    @tf.function
    def update(values: tf.Tensor, ids: tf.Tensor) -> None:
        with ordered_sums():
            optimizer.apply([tf.IndexedSlices(values, ids, tf.constant([ROWS, WIDTH]))], [weight])

    graph = update.get_concrete_function(
        tf.TensorSpec([None, WIDTH], tf.float64), tf.TensorSpec([None], tf.int32)
    ).graph
    sums = [op for op in graph.get_operations() if op.type == "UnsortedSegmentSum" or "Scatter" in op.type]
    assert sums
    for op in sums:
        on_cpu = op.type == "UnsortedSegmentSum" and op.device.endswith("CPU:0")
        assert on_cpu or op.inputs[1].op.type == "Unique", (op.name, op.type, op.device)


def test_conversions_elsewhere_are_left_to_tensorflow() -> None:
    with ordered_sums():
        pass

    @tf.function
    def dense() -> tf.Tensor:
        return tf.convert_to_tensor(slices())

    types = {op.type for op in dense.get_concrete_function().graph.get_operations()}
    assert "UnsortedSegmentSum" in types
    assert "Unique" not in types
