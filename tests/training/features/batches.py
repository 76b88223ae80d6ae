"""What a batch is made of: sparse matrices, nothing for an optional input, parts without rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.errors import DataError
from tests.training.features.registry import feature
from tests.training.fidelity import BATCH, both, deterministic_weights, mlp, outcome, rows, size


def batches_of(arrays: tuple[np.ndarray, ...], batch: int, convert: Callable[..., Any]) -> Iterator[Any]:
    for start in range(0, len(arrays[0]), batch):
        yield convert(*(array[start : start + batch] for array in arrays))


def steps(data: Any, num_samples: int, batch: int) -> int | None:
    """Where Keras does not know the length, its last step counts one iteration too many."""
    return -(-num_samples // batch) if isinstance(data, Iterator) else None


def sparse_model() -> keras.Model:
    model = keras.Sequential([keras.Input((5,), sparse=True), keras.layers.Dense(2)])
    deterministic_weights(model)
    return model


@feature
def generators_of_sparse_matrices() -> None:
    """Of SciPy and of JAX: Keras' adapter converts them."""
    import jax.experimental.sparse
    import scipy.sparse

    x, y = rows("ragged")
    x = np.where(np.abs(x) > 0.5, x, 0.0)
    jax.config.update("jax_enable_x64", True)
    for sparse in (scipy.sparse.csr_matrix, scipy.sparse.coo_array, jax.experimental.sparse.BCOO.fromdense):
        for scope in ({}, {"scale_batch": False}):

            def script(batch: int, sparse: Any = sparse, scope: Any = scope) -> dict[str, Any]:
                model = sparse_model()
                model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
                batch = 6 if scope else batch
                data = batches_of((x, y), batch, lambda x, y: (sparse(x), y))
                return outcome(model, model.fit(data, steps_per_epoch=steps(data, len(x), batch), verbose=0))

            both(script, **scope)


generators_of_sparse_matrices.needs_every_package = True  # type: ignore[attr-defined]


class Sum(keras.Model):
    """Adds up its inputs, of which one may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2, kernel_initializer="ones")

    def call(self, inputs: Any) -> Any:
        x, extra = inputs["x"], inputs["extra"]
        return self.dense(x if extra is None else x + extra)


@feature
def nothing_for_an_optional_input() -> None:
    """`None` in the batches of a generator: for an input and for sample weights."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = Sum()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        data = batches_of((x, y), batch, lambda x, y: ({"x": x, "extra": None}, y, None))
        return outcome(model, model.fit(data, steps_per_epoch=steps(data, len(x), batch), verbose=0))

    both(script)


class Anchored(keras.Model):
    """Compares its rows with points that are no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def call(self, inputs: Any) -> Any:
        x, anchors = inputs["x"], inputs["anchors"]
        keras.ops.reshape(anchors, (3, 5))
        return self.inner(x + keras.ops.sum(anchors, axis=0))


ANCHORS = np.arange(15.0).reshape(3, 5) / 50


@feature
def parts_of_a_batch_without_rows() -> None:
    """As the first leaf of a batch: in a map, in a generator, in a `PyDataset`, with known sizes and unknown ones."""
    x, y = rows("ragged")
    even, targets = x[: len(x) // (BATCH * size()) * BATCH * size()], y[: len(x) // (BATCH * size()) * BATCH * size()]

    def anchored(x: Any, y: Any) -> Any:
        return {"anchors": ANCHORS, "x": x}, y

    def mapped(batch: int) -> Any:
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).map(anchored)

    def known_sizes(batch: int) -> Any:
        return tf.data.Dataset.from_tensor_slices((even, targets)).batch(batch, drop_remainder=True).map(anchored)

    def generator(batch: int) -> Any:
        return batches_of((x, y), batch, anchored)

    def run(make: Any, **scope: Any) -> None:
        def script(batch: int) -> dict[str, Any]:
            model = Anchored()
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
            batch = 6 if scope else batch
            data = make(batch)
            return outcome(model, model.fit(data, steps_per_epoch=steps(data, len(x), batch), verbose=0))

        both(script, **scope)

    for make in (mapped, known_sizes, generator):
        run(make)
    run(mapped, scale_batch=False)
    even, targets = x[: len(x) // 6 * 6], y[: len(x) // 6 * 6]
    run(known_sizes, scale_batch=False)


class Neighbours(keras.Model):
    """Adds up what a graph's edges lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def call(self, inputs: Any) -> Any:
        nodes, edges = inputs
        sums = tf.math.unsorted_segment_sum(tf.gather(nodes, edges[:, 0]), edges[:, 1], tf.shape(nodes)[0])
        return self.inner(sums)


def graphs(number: int) -> list[Any]:
    """Returns the nodes, edges and targets of graphs of other sizes."""
    generator = np.random.default_rng(number)
    made = []
    for index in range(number):
        num_nodes, num_edges = 3 + index, 4 + 2 * index
        edges = generator.integers(0, num_nodes, (num_edges, 2))
        made.append(((generator.normal(size=(num_nodes, 5)), edges), generator.normal(size=(num_nodes, 2))))
    return made


def joined(parts: list[Any]) -> Any:
    """Returns one graph of several, which are not connected."""
    starts = np.cumsum([0, *(len(nodes) for (nodes, _), _ in parts)])
    edges = [edges + start for ((_, edges), _), start in zip(parts, starts[:-1], strict=True)]
    nodes = [nodes for (nodes, _), _ in parts]
    return (np.concatenate(nodes), np.concatenate(edges)), np.concatenate([targets for _, targets in parts])


@feature
def batches_that_are_graphs() -> None:
    """Each rank takes whole graphs; one is not split, and the error says so."""
    made = graphs(2 * size() + 1)

    def generator(batch: int) -> Iterator[Any]:
        step = batch // BATCH
        yield from (joined(made[at : at + step]) for at in range(0, len(made), step))

    def dataset(batch: int) -> tf.data.Dataset:
        floats = tf.TensorSpec([None, None], tf.float64)
        signature = ((floats, tf.TensorSpec([None, 2], tf.int64)), floats)
        return tf.data.Dataset.from_generator(lambda: generator(batch), output_signature=signature)

    for make in (generator, dataset):

        def script(batch: int, make: Any = make) -> dict[str, Any]:
            model = Neighbours()
            model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
            steps = -(-len(made) * BATCH // batch)
            return outcome(model, model.fit(make(batch), steps_per_epoch=steps, verbose=0))

        both(script)
    (inputs, targets) = made[0]
    for train in (
        lambda model: model.fit(generator(BATCH), verbose=0),
        lambda model: model.fit(dataset(BATCH), verbose=0),
        lambda model: model.train_on_batch(inputs, targets),
    ):
        with kdist.scope(scale_batch=False):
            model = Neighbours()
            model.compile("sgd", "mse")
            with pytest.raises((DataError, tf.errors.InvalidArgumentError), match="parts have different first dim"):
                train(model)
