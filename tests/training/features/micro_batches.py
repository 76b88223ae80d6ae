"""`micro_batches`: a step takes as many of the user's batches on any number of ranks."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.errors import DataError
from tests.training.features.registry import feature
from tests.training.fidelity import BATCH, compare, fed, fit_alone, fresh, mlp, of_the_chief, size


def some_rows(num_batches: int, missing: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(num_batches * BATCH - missing, 5))
    return x, x @ generator.normal(size=(5, 2))


def trained(data: dict[str, Any], **fit: Any) -> dict[str, Any]:
    model = mlp()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return fit_alone(model, data, **fit)


def equal(number: int, plain: Any, ours: Any, **fit: Any) -> None:
    """Compares a plain training with one in the scope; each function returns the arguments that feed it."""
    expected = of_the_chief(lambda: trained(plain(), **fit))
    fresh()
    with kdist.scope(scale_lr=None, micro_batches=number):
        found = trained(ours(), **fit)
    compare(expected, found)


@feature
def micro_batches_of_any_input() -> None:
    arrays = some_rows(2 * 4 * 3 + 1, missing=3)  # the last step has fewer
    validation = {"validation_data": some_rows(3), "validation_batch_size": BATCH}
    # Fewer than ranks, more, and of three ranks no multiple.
    for kind, number in (("arrays", 4), ("tf_data", 1), ("tf_data_unknown", 4), ("py_dataset", 1), ("py_dataset", 4)):
        equal(
            number,
            lambda kind=kind, number=number: fed(kind, arrays, number * BATCH),
            lambda kind=kind: fed(kind, arrays, BATCH),
            **(validation if kind == "arrays" else {}),
        )


@feature
def micro_batches_of_a_generator() -> None:
    """An epoch's last step takes what is left of it."""
    arrays = some_rows(2 * 4 + 1)
    equal(4, lambda: fed("generator", arrays, 4 * BATCH), lambda: fed("generator", arrays, BATCH))


@feature
def micro_batches_of_several_epochs_in_a_pass() -> None:
    """Steps restart with each epoch: 5 batches are 4 and 1."""
    x, y = some_rows(10)
    bounds = np.cumsum([0, 4, 1, 4, 1]) * BATCH

    def plain() -> dict[str, Any]:
        steps = [(x[start:stop], y[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]
        return {"x": (step for step in steps), "steps_per_epoch": 2}

    repeated = {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()}
    for data in (fed("arrays", (x, y), BATCH), fed("py_dataset_workers", (x, y), BATCH), repeated):
        equal(4, plain, lambda data=data: {**data, "steps_per_epoch": 5})


class Summed(keras.Model):
    """Of rows of any length, dense, sparse or ragged."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x: Any) -> Any:
        if isinstance(x, tf.SparseTensor):
            x = tf.sparse.to_dense(x)
        return self.dense(tf.reduce_sum(tf.cast(x, tf.float64), axis=1, keepdims=True))


@feature
def micro_batches_of_sparse_ragged_and_padded_rows() -> None:
    """Padded rows of one length are joined; of several, they are refused, unless each rank takes a batch."""
    number, lengths = 4, np.arange(2 * 4 * BATCH) // 3 % 5 + 1
    ragged = tf.RaggedTensor.from_row_lengths(np.random.default_rng(1).normal(size=lengths.sum()), lengths)
    y = np.arange(float(len(lengths)))[:, None] / 30
    of_rows = tf.data.Dataset.from_tensor_slices((ragged, y))

    def padded(x: Any, y: Any, width: int | None = None) -> Any:
        return tf.ensure_shape(x.to_tensor(shape=[None, width]), [None, None]), y

    kinds = {
        "ragged": lambda batch: of_rows.batch(batch),
        "sparse": lambda batch: of_rows.batch(batch).map(lambda x, y: (x.to_sparse(), y)),
        "padded": lambda batch: of_rows.batch(batch).map(functools.partial(padded, width=7)),
    }

    def run(data: Any) -> dict[str, Any]:
        model = Summed()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return fit_alone(model, {"x": data})

    for make in kinds.values():
        expected = of_the_chief(lambda make=make: run(make(number * BATCH)))
        fresh()
        with kdist.scope(scale_lr=None, micro_batches=number):
            found = run(make(BATCH))
        compare(expected, found)
    fresh()
    with kdist.scope(micro_batches=size()):
        run(of_rows.batch(BATCH).map(padded))
    refused = pytest.raises((DataError, tf.errors.InvalidArgumentError), match="cannot be joined")
    with refused, kdist.scope(micro_batches=size() + 1):
        run(of_rows.batch(BATCH).map(padded))


@feature
def micro_batches_scale_the_learning_rate() -> None:
    """By their number, not by that of the ranks."""
    x, y = some_rows(8)
    for number in (1, 4):
        fresh()
        with kdist.scope(micro_batches=number, warmup_epochs=0):
            model = mlp()
            model.compile(keras.optimizers.SGD(0.01), "mse")
            model.fit(x, y, batch_size=BATCH, verbose=0)
        assert model._kdist.rates()[0].rule.factor == number


@feature
def micro_batches_of_data_of_each_rank_are_refused() -> None:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = tf.data.Dataset.from_tensor_slices(some_rows(8)).batch(BATCH).with_options(options)
    with kdist.scope(micro_batches=size() + 1):
        model = mlp()
        model.compile("sgd", "mse")
        with pytest.raises(DataError, match=r"Received: micro_batches=.*AutoShardPolicy.OFF"):
            model.fit(dataset, verbose=0)
