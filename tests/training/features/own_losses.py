"""Losses that a layer, `compute_loss` or `train_step` computes by hand: sums over rows, means, and others."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import kdist
from kdist.errors import NotSynchronizedError
from tests.helpers.logs import logged
from tests.training.features.registry import feature
from tests.training.fidelity import (
    BATCH,
    both,
    deterministic_weights,
    fed,
    fit_alone,
    mlp,
    outcome,
    rows,
    sequences,
)

NO_MEAN = "it relates rows"
FIXED_NUMBER = "can only be traced for a fixed number of rows"
EAGER = "in eager steps (run_eagerly=True)"
WRITES = "the step writes the weight"
OF_RANK = "is given what relates rows of this rank"
UNKNOWN = "cannot find out whether it is a mean or a sum"
TOLD = (NO_MEAN, UNKNOWN, FIXED_NUMBER, EAGER, WRITES, OF_RANK)


def silently_both(script: Callable[[int], dict[str, Any]], **arguments: Any) -> None:
    """Compares all ranks with one process, where nothing may be told of losses."""
    with logged(logging.WARNING) as said:
        both(script, **arguments)
    assert not [text for text in said if any(each in text for each in TOLD)], said


def told(make: Callable[[], keras.Model], what: str, data: Any = None, batch_size: int = BATCH) -> list[str]:
    """Trains a step on all ranks, which must be told of losses that are no means over rows; returns what is said."""
    x, y = rows("ragged") if data is None else data
    with (
        logged(logging.WARNING) as said,
        kdist.scope(scale_lr=None),
        contextlib.suppress(NotSynchronizedError),  # of weights that were written and rounded
    ):
        model = make()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        model.fit(x, y, batch_size=batch_size, steps_per_epoch=1, verbose=0)
    found = [text for text in said if any(each in text for each in TOLD)]
    assert bool(found) == (kdist.rank() == 0), said
    assert all(what in text for text in found), said
    return found


class Adds(keras.layers.Layer):
    """Adds a loss of its input, as Keras' guides do."""

    def __init__(self, loss: Callable[[Any], Any], name: str) -> None:
        super().__init__(name=name)
        self.loss = loss

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.loss(inputs))
        return inputs


def row_count(x: Any) -> Any:
    return ops.cast(ops.shape(x)[0], x.dtype)


MEANS_ADDED: dict[str, Callable[[Any], Any]] = {
    "a mean of sums": lambda x: ops.mean(ops.sum(x**2, axis=1)),
    "a sum of means": lambda x: ops.sum(ops.mean(x**2, axis=0)),
    "a sum over the number of rows": lambda x: ops.sum(x**2) / row_count(x),
    "a sum of shares": lambda x: ops.sum(x**2 / row_count(x)),
    "a constant": lambda x: ops.sum(ops.ones((3,), x.dtype)),
}
SUMS_ADDED: dict[str, Callable[[Any], Any]] = {
    "a sum": lambda x: 1e-2 * ops.sum(x**2),
    "a number for each row": lambda x: 1e-2 * ops.sum(x**2, axis=1),
    "a sum of chosen rows": lambda x: 1e-2 * ops.sum(tf.boolean_mask(x, x[:, 0] > 0) ** 2),
    "a mean and a sum": lambda x: ops.mean(x**2) + 0.01 * ops.sum(x**2),
}
OF_MEANS_ADDED: dict[str, Callable[[Any], Any]] = {
    "a root": lambda x: ops.sqrt(ops.mean(x**2)),
    "products of means": lambda x: ops.mean(ops.mean(x, axis=0) * ops.mean(ops.abs(x), axis=0)),
    "a mean of chosen rows": lambda x: ops.mean(tf.boolean_mask(x, x[:, 0] > 0) ** 2),
    "correlations": lambda x: ops.sum((ops.matmul(ops.transpose(x), x) / row_count(x)) ** 2),
    "a variance": lambda x: ops.mean((x - ops.mean(x, axis=0)) ** 2),
    "of equal variance": lambda x: ops.mean(ops.tanh((x - ops.mean(x, axis=0)) / (ops.std(x, axis=0) + 0.1)) ** 3),
}
OF_ROWS_ADDED: dict[str, Callable[[Any], Any]] = {
    "pairs": lambda x: ops.mean(ops.log_softmax(ops.matmul(x, ops.transpose(x)))),
    "a maximum": lambda x: ops.max(x),
    "a root of a maximum": lambda x: ops.sqrt(ops.max(ops.sum(x**2, axis=1))),
}


def of_python(x: Any) -> Any:
    """What no graph shows."""
    return tf.ensure_shape(tf.numpy_function(lambda value: value, [x], x.dtype), x.shape)


OTHERS_ADDED: dict[str, Callable[[Any], Any]] = {
    "a maximum of Python": lambda x: ops.max(x) * tf.stop_gradient(of_python(ops.max(x))),
    "pairs of Python": lambda x: ops.mean(ops.matmul(x, ops.transpose(x))) * tf.stop_gradient(of_python(ops.max(x))),
}


def with_added(losses: dict[str, Callable[[Any], Any]]) -> keras.Model:
    adding = [Adds(loss, name.replace(" ", "_")) for name, loss in losses.items()]
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(4), *adding, keras.layers.Dense(2, kernel_regularizer="l2")]
    )
    deterministic_weights(model)
    return model


def train_added(name: str) -> None:
    x, y = rows(name)

    def script(batch: int) -> dict[str, Any]:
        model = with_added({**MEANS_ADDED, **SUMS_ADDED, **OF_MEANS_ADDED, **OF_ROWS_ADDED})
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return fit_alone(model, fed("arrays", (x, y), batch), validation_data=(x, y))

    silently_both(script)


@feature
def means_sums_and_what_is_of_them_that_layers_add() -> None:
    train_added("ragged")


@feature
def means_sums_and_what_is_of_them_that_layers_add_to_full_batches() -> None:
    train_added("even")


def ctc(x: Any) -> Any:
    """A number for each row, as the OCR example of Keras adds it."""
    number = ops.shape(x)[0]
    return 1e-2 * ops.ctc_loss(ops.tile([[1, 2, 3]], (number, 1)), x, tf.fill((number,), 3), tf.fill((number,), 8))


@feature
def ctc_losses_that_a_layer_adds() -> None:
    """TensorFlow computes them by a loop that calls a function under the function's own name."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        steps = [keras.layers.Dense(48), keras.layers.Reshape((8, 6)), Adds(ctc, "ctc"), keras.layers.Flatten()]
        model = keras.Sequential([keras.Input((5,)), *steps, keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return fit_alone(model, fed("arrays", (x, y), batch), validation_data=(x, y))

    silently_both(script, rtol=1e-5)  # they are computed in 32 bits


@feature
def added_losses_that_are_no_means_are_told_of() -> None:
    said = told(lambda: with_added(OTHERS_ADDED), "(`add_loss`) is computed from this rank's rows")
    for name in OTHERS_ADDED if kdist.rank() == 0 else ():
        assert any(f"A loss of the layer '{name.replace(' ', '_')}'" in text for text in said), (name, said)


MEANS: dict[str, Callable[[Any, Any], Any]] = {
    "of shares": lambda y, p: ops.sum((y - p) ** 2 / row_count(p)),
    "over rows": lambda y, p: keras.losses.MeanSquaredError(reduction="sum")(y, p) / row_count(p),
    "of Keras' loss": lambda y, p: keras.losses.MeanSquaredError()(y, p),
    "in a scan": lambda y, p: tf.reduce_sum(tf.map_fn(lambda c: ops.mean(c**2), ops.transpose(y - p))),
    "of gathered sums": lambda y, p: 0.01 * kdist.all_reduce(ops.sum((y - p) ** 2)),
    "root of gathered means": lambda y, p: ops.sqrt(kdist.all_reduce(ops.mean((y - p) ** 2), "mean")),
}


@tf.function
def squared(one: Any, other: Any) -> Any:
    return 0.01 * tf.reduce_sum((one - other) ** 2)


def drawn(p: Any, **seed: int) -> Any:
    """The same for each row, whatever is drawn, as a step of a diffusion model draws a time for each."""
    shape = (ops.shape(p)[0], 1)
    times = keras.random.randint(shape, 1, 5, **seed) if seed else tf.random.uniform(shape, 1, 5, tf.int32)
    return ops.take(ops.convert_to_tensor([np.nan, 0.01, 0.01, 0.01, 0.01], p.dtype), times)


SUMS: dict[str, Callable[[Any, Any], Any]] = {
    "squares": lambda y, p: 0.01 * ops.sum((y - p) ** 2),
    "of Keras' loss": lambda y, p: keras.losses.MeanSquaredError(reduction="sum")(y, p),
    "over a constant": lambda y, p: ops.sum((y - p) ** 2) / BATCH,
    "of a mean and a sum": lambda y, p: 2 * ops.mean((y - p) ** 2) - 0.01 * (1 - ops.sum(ops.abs(y - p))),
    "of 600 terms": lambda y, p: sum([ops.sum(ops.abs(y - p)) / 9000] * 600, 0.0),
    "over columns": lambda y, p: ops.sum((y - p) ** 2) / tf.cast(tf.shape(p)[1], p.dtype),
    "in a function": lambda y, p: squared(y, p),
    "in a loop": lambda y, p: tf.while_loop(
        lambda i, _: i < 2,
        lambda i, total: (i + 1, total + 0.01 * ops.sum((y - p)[:, i] ** 2)),
        (0, tf.zeros((), p.dtype)),
    )[1],
    "of chosen rows": lambda y, p: 0.01 * ops.sum(tf.boolean_mask(y - p, y[:, 0] > 0) ** 2),
    "of many terms": lambda y, p: (
        tf.add_n([0.03 * ops.sum((y - p) ** 2), ops.mean(p**2)]) / 3 - keras.ops.sum([ops.sum(0.01 * p), ops.mean(y)])
    ),
    "beside a small mean": lambda y, p: 10 * ops.sum((y - p) ** 2) + ops.mean(p**2) / 400,
    "of rows": lambda y, p: 0.01 * ops.sum((y - p) ** 2, axis=1),
    "by drawn integers": lambda y, p: ops.sum(drawn(p) * (y - p) ** 2),
    "by drawn integers of a seed": lambda y, p: ops.sum(drawn(p, seed=3) * (y - p) ** 2),
}


def positives(y: Any) -> Any:
    """A mask that is 0 for all rows that kdist may make up."""
    return ops.cast(y > 1e3 * (1 - y), y.dtype)


ROW = rows("ragged")[1][3]


def masked(y: Any, p: Any, mask: Any) -> Any:
    mask = ops.cast(mask, p.dtype)
    return ops.sum((y - p) ** 2 * mask) / ops.sum(mask)


def own_gradient(x: Any) -> Any:
    @tf.custom_gradient
    def tanh(x: Any) -> Any:
        t = tf.tanh(x)
        return t, lambda upstream: upstream * (1 - t**2)

    return tanh(x)


def weighted_by_kind(y: Any, p: Any) -> Any:
    """Each row counts as much as the predictions of its kind are large together: a bincount has no gradient."""
    kinds = ops.cast(y[:, 0] > 0, "int32")
    sums = tf.math.bincount(kinds, weights=tf.stop_gradient(ops.abs(p[:, 0])), minlength=2, maxlength=2)
    return ops.mean(ops.sum((y - p) ** 2, axis=1) * tf.gather(sums / ops.sum(sums), kinds))


OF_MEANS: dict[str, Callable[[Any, Any], Any]] = {
    "of chosen rows that are all of the made-up ones": lambda y, p: ops.mean(
        tf.boolean_mask((y - p) ** 2, tf.not_equal(y[:, 0], ROW[0]))
    ),
    "over an integer count": lambda y, p: (
        ops.sum((y - p) ** 2 * ops.cast(y > 0, p.dtype))
        / ops.cast(ops.maximum(ops.sum(ops.cast(y > 0, "int32")), 1), p.dtype)
    ),
    "checked": lambda y, p: tf.debugging.check_numerics(ops.sqrt(ops.mean((y - p) ** 2)), "loss"),
    "root": lambda y, p: ops.sqrt(ops.mean((y - p) ** 2)),
    "over positives": lambda y, p: ops.sum((y - p) ** 2) / ops.maximum(1.0, ops.sum(positives(y))),
    "masked": lambda y, p: ops.sum((y - p) ** 2 * ops.cast(y > 0, p.dtype)) / ops.sum(ops.cast(y > 0, p.dtype)),
    "masked by what all made-up rows have": lambda y, p: masked(y, p, ops.not_equal(y, ROW)),
    "of weights that are normalised": lambda y, p: ops.sum(
        (y - p) ** 2 * (ops.abs(y) / ops.sum(ops.abs(y))) * 2 + 0 * p
    ),
    "dice": lambda y, p: ops.mean(
        1 - (2 * ops.sum(y * p, axis=0) + 1) / (ops.sum(y**2, axis=0) + ops.sum(p**2, axis=0) + 1)
    ),
    "of chosen rows": lambda y, p: ops.mean(tf.boolean_mask(y - p, y[:, 0] > 0) ** 2) + ops.mean(p**2),
    "over the number of chosen rows": lambda y, p: (
        ops.sum(tf.boolean_mask(y - p, y[:, 0] > 0) ** 2) / row_count(tf.boolean_mask(y, y[:, 0] > 0))
    ),
    "of targets that are normalized, by a loss of Keras'": lambda y, p: keras.losses.MeanSquaredError()(
        (y - ops.mean(y, axis=0)) / ops.std(y, axis=0), p
    ),
    "explained variance": lambda y, p: ops.sum((y - p) ** 2) / ops.sum((y - ops.mean(y, axis=0)) ** 2),
    "of Keras' weighted mean": lambda y, p: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")(
        y, p, sample_weight=ops.abs(y[:, 0])
    ),
    "focal": lambda y, p: ops.sum(ops.log(ops.mean(ops.exp(-((y - p) ** 2)), axis=0))) ** 2 / 4 + 0.01 * ops.sum(p**2),
    "weighted by kind": weighted_by_kind,
}


def errors(y: Any, p: Any) -> Any:
    return ops.sum((y - p) ** 2, axis=1)


KEPT: list[tf.Variable] = []


@tf.function
def warm(one: Any, other: Any) -> Any:
    if not KEPT:
        KEPT.append(tf.Variable(0.5, dtype=one.dtype, trainable=False))
    return ops.mean(ops.log_softmax(KEPT[0] * ops.matmul(one, ops.transpose(other))))


def nearest(y: Any, p: Any) -> Any:
    """The loss of triplets with the hardest negative of the batch."""
    distances = ops.sum((y[:, None] - p[None]) ** 2, axis=-1)
    own = ops.diagonal(distances)
    others = ops.min(distances + 1e3 * ops.eye(ops.shape(y)[0], dtype=y.dtype), axis=1)
    return ops.mean(ops.maximum(0.0, own - others + 0.5))


OF_ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "contrastive": lambda y, p: ops.mean(ops.log_softmax(ops.matmul(y, ops.transpose(p)))),
    "contrastive, by numbers of rows": lambda y, p: ops.mean(
        keras.losses.sparse_categorical_crossentropy(
            ops.arange(ops.shape(y)[0]), ops.matmul(y, ops.transpose(p)), from_logits=True
        )
    ),
    "hardest triplets": nearest,
    "hardest rows": lambda y, p: ops.mean(ops.top_k(ops.sum((y - p) ** 2, axis=1), 3)[0]),
    "times a maximum": lambda y, p: ops.mean((y - p) ** 2) * ops.max(ops.cast(y > -7, p.dtype)),
    "ranks": lambda y, p: ops.mean(ops.sort(p[:, 0]) * ops.sort(y[:, 0])),
    "a median of errors": lambda y, p: ops.median(ops.sum((y - p) ** 2, axis=1)),
    "differences of all pairs": lambda y, p: ops.mean(
        ops.maximum(0.0, 1 - ops.sign(y[:, :1] - ops.transpose(y[:, :1])) * (p[:, :1] - ops.transpose(p[:, :1])))
    ),
    "means in a branch": lambda y, p: tf.cond(ops.sum(p) > 1e6, lambda: ops.mean(p), lambda: ops.mean((y - p) ** 2)),
    "a masked loss in a branch": lambda y, p: tf.cond(
        ops.any(y != 7), lambda: masked(y, p, y != 7), lambda: 0 * ops.sum(p)
    ),
    "integers of a branch, which have no gradient": lambda y, p: (
        ops.logsumexp(errors(y, p))
        * ops.cast(
            tf.cond(ops.any(y > 7), lambda: 1, lambda: ops.cast(2 + ops.max(ops.cast(y > 0, p.dtype)), "int32")),
            p.dtype,
        )
    ),
    "a fold": lambda y, p: (
        ops.sqrt(ops.mean((y - p) ** 2))
        * tf.foldl(lambda most, row: tf.maximum(most, tf.norm(row)), y, tf.zeros((), y.dtype))
    ),
    "in a branch": lambda y, p: tf.cond(
        ops.any(y > 0), lambda: ops.sum(p) / ops.sum(ops.cast(y > 0, p.dtype)), lambda: 0.01 * ops.sum((y - p) ** 2)
    ),
    "the first rows of the batch": lambda y, p: ops.logsumexp(
        ops.where(ops.arange(ops.shape(p)[0]) < 6, errors(y, p), -1e3)
    ),
    "some rows by their numbers": lambda y, p: ops.logsumexp(tf.gather(errors(y, p), tf.range(0, tf.shape(p)[0], 2))),
    "rows of small losses": lambda y, p: ops.logsumexp(
        tf.boolean_mask(errors(y, p), ops.argsort(ops.argsort(errors(y, p))) < 6)
    ),
    "a mean of rows of small losses": lambda y, p: ops.mean(
        ops.where(ops.argsort(ops.argsort(errors(y, p))) < 6, errors(y, p), 0)
    ),
    "rows until a sum is reached": lambda y, p: ops.logsumexp(
        errors(y, p) * ops.cast(ops.cumsum(errors(y, p)) < 1e3, p.dtype)
    ),
    "a gradient of its own for each row": lambda y, p: ops.sqrt(1 + ops.max(own_gradient(y - p))),
}
OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "contrastive in a function with a variable": lambda y, p: warm(y, p),
    "a function of Python": lambda y, p: ops.mean((y - p) ** 2) * tf.stop_gradient(of_python(ops.sqrt(ops.mean(y**2)))),
    "a gradient of its own": lambda y, p: ops.sqrt(1 + ops.mean(own_gradient(p - ops.mean(p, axis=0)) ** 3)),
}


OF_A_WRITTEN_NUMBER: dict[str, Callable[[Any, Any], Any]] = {
    "contrastive by a number of rows that is written down": lambda y, p: ops.mean(
        keras.losses.sparse_categorical_crossentropy(
            tf.range(12 // kdist.size()), ops.matmul(y, ops.transpose(p)), from_logits=True
        )
    ),
    "beside a number of rows that is written down": lambda y, p: ops.mean(
        ops.exp(ops.matmul(y, ops.transpose(p))) * (1 - tf.eye(12 // kdist.size(), dtype=p.dtype))
    ),
}


class ByHand(keras.Model):
    """A step of the user's own, that logs its loss by itself and as a metric."""

    def __init__(self, loss: Callable[[Any, Any], Any], *, scales: bool = False) -> None:
        super().__init__()
        self.net, self.own_loss, self.scales = mlp(), loss, scales
        self.tracker = keras.metrics.Mean(name="tracked")

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = scaled = self.own_loss(y, self(x, training=True))
            if self.scales:
                scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result(), "last": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        self.tracker.update_state(self.own_loss(data[1], self(data[0])))
        return {"tracked": self.tracker.result()}


class OfOwnLoss(keras.Model):
    """A `compute_loss` of the user's own."""

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.net, self.own_loss = mlp(), loss

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *rest: Any, **kwargs: Any) -> Any:
        return self.own_loss(y, y_pred)


def by_hand(make: Callable[[], keras.Model], name: str = "ragged") -> Callable[[int], dict[str, Any]]:
    x, y = rows(name)

    def script(batch: int) -> dict[str, Any]:
        model = make()
        model.compile(keras.optimizers.SGD(0.01))
        history = model.fit(
            x,
            y,
            batch_size=batch,
            epochs=2,
            shuffle=False,
            verbose=0,
            validation_data=(x, y),
            validation_batch_size=batch,
        )
        return outcome(model, history)

    return script


def models_of(loss: Callable[[Any, Any], Any]) -> list[Callable[[], keras.Model]]:
    return [lambda: ByHand(loss), lambda: ByHand(loss, scales=True), lambda: OfOwnLoss(loss)]


@feature
def means_that_a_step_differentiates() -> None:
    losses = list(MEANS.values())
    for number in range(3):

        def loss(y: Any, p: Any, own: Any = losses[number::3]) -> Any:
            return sum(each(y, p) for each in own)

        silently_both(by_hand(models_of(loss)[number]))


def train_sums(part: slice) -> None:
    """Where all batches are full, the number of rows is a constant of the first graph."""
    for number, (name, loss) in list(enumerate(SUMS.items()))[part]:
        make = models_of(loss)[2 if name == "of rows" else number % 3]  # logs and metrics take scalars
        silently_both(by_hand(make, ("ragged", "even")[number % 2]))


@feature
def sums_that_a_step_differentiates() -> None:
    train_sums(slice(0, 4))


@feature
def more_sums_that_a_step_differentiates() -> None:
    train_sums(slice(4, None))


def train_each(losses: dict[str, Callable[[Any, Any], Any]], part: slice = slice(None)) -> None:
    """Trains by each of some losses, or of a part of them; the models and the numbers of rows take turns."""
    for number, (name, loss) in list(enumerate(losses.items()))[part]:
        try:
            silently_both(by_hand(models_of(loss)[number % 3], ("ragged", "even")[number // 2 % 2]))
        except AssertionError as error:
            raise AssertionError(name) from error


@feature
def functions_of_means_and_sums_that_a_step_differentiates() -> None:
    train_each(OF_MEANS, slice(None, None, 2))


@feature
def more_functions_of_means_and_sums_that_a_step_differentiates() -> None:
    train_each(OF_MEANS, slice(1, None, 2))


@feature
def losses_that_relate_rows_that_a_step_differentiates() -> None:
    train_each(OF_ROWS, slice(None, None, 4))


@feature
def more_losses_that_relate_rows_that_a_step_differentiates() -> None:
    for start in range(1, 4):
        train_each(OF_ROWS, slice(start, None, 4))


@feature
def losses_of_each_row_that_relate_rows() -> None:
    """A tape differentiates their sum."""

    def simclr(y: Any, p: Any) -> Any:
        pairs = ops.matmul(y, ops.transpose(p))
        one, other = pairs, ops.transpose(pairs)
        entropy = keras.losses.sparse_categorical_crossentropy
        return 0.1 * sum(entropy(ops.arange(ops.shape(y)[0]), each, from_logits=True) for each in (one, other))

    silently_both(
        by_hand(lambda: OfOwnLoss(lambda y, p: 0.01 * ops.logsumexp(ops.matmul(y, ops.transpose(p)), axis=1)))
    )
    silently_both(by_hand(lambda: OfOwnLoss(simclr), "even"))


@feature
def losses_of_which_nothing_is_found_out_are_told_of() -> None:
    """Python computes them, of which a mean is seen by the operation that computes it."""

    def in_python(y: Any, p: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(lambda value: value**2, [tf.stop_gradient(y - p)], p.dtype), y.shape)

    told(lambda: OfOwnLoss(lambda y, p: 0.1 * ops.sum(p * in_python(y, p))), UNKNOWN)
    silently_both(by_hand(lambda: ByHand(lambda y, p: 0.5 * ops.mean(p * in_python(y, p)) + ops.mean(p))))


@feature
def sums_by_hand_in_other_steps() -> None:
    """Several steps an execution, a batch at a time, of two models, compiled by XLA."""

    class Two(ByHand):
        """Two losses, each with its own weights and tape, as in a GAN."""

        def __init__(self) -> None:
            super().__init__(SUMS["squares"])
            self.other = keras.layers.Dense(2, kernel_initializer=keras.initializers.Constant(0.1))

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as own, tf.GradientTape() as other:
                loss = self.own_loss(y, self.net(x, training=True))
                far = ops.mean(self.other(x) ** 2) + 0.1 * SUMS["squares"](y, self.other(x))
            weights = [*self.net.trainable_variables, *self.other.trainable_variables]
            gradients = own.gradient(loss, self.net.trainable_variables)
            gradients += other.gradient(far, self.other.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return {"loss": loss, "far": far}

    x, y = rows("even")

    def script(batch: int, make: Any, **arguments: Any) -> dict[str, Any]:
        model = make()
        model.compile(keras.optimizers.SGD(0.01), **arguments)
        return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

    class Named(ByHand):
        """Steps that have other names, as functions of the user's."""

        train_step = lambda own, data: ByHand.train_step(own, data)  # noqa: E731
        test_step = lambda own, data: ByHand.test_step(own, data)  # noqa: E731

    silently_both(by_hand(lambda: Named(SUMS["squares"]), "even"))
    silently_both(lambda batch: script(batch, lambda: ByHand(SUMS["squares"]), steps_per_execution=2))
    silently_both(lambda batch: script(batch, lambda: OfOwnLoss(SUMS["of many terms"]), jit_compile=True))
    silently_both(lambda batch: script(batch, Two))

    def with_zeros() -> keras.Model:
        """The added loss is 0 at first, and its gradient not."""
        heads = keras.layers.Dense(3, kernel_initializer="zeros"), Adds(lambda z: ops.sum(1 - ops.exp(z)), "adds")
        return keras.Sequential([keras.Input((5,)), *heads, keras.layers.Dense(2, kernel_initializer="ones")])

    silently_both(lambda batch: script(batch, with_zeros, loss="mse"))

    def on_batches(_: int) -> dict[str, Any]:
        model = ByHand(SUMS["squares"])
        model.compile(keras.optimizers.SGD(0.01))
        logs = [model.train_on_batch(x[:12], y[:12], return_dict=True) for _ in range(2)]
        return {"weights": model.get_weights(), "logs": logs}

    silently_both(on_batches)


@feature
def sums_beside_what_keras_computes() -> None:
    """The compiled loss, what layers add, a learned factor, a scaled loss, metrics of integers and of a function."""

    class Beside(ByHand):
        def __init__(self, loss: Callable[[Any, Any, Any, Any], Any]) -> None:
            super().__init__(lambda y, p: p)
            self.net = with_added({"a sum": SUMS_ADDED["a sum"]})
            self.of_all = loss
            self.factor = self.add_weight(name="factor", initializer=keras.initializers.Constant(0.3))

        @tf.function
        def note(self, loss: Any) -> None:
            self.tracker.update_state(loss)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.of_all(self, x, y, self.net(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            self.note(ops.mean(y))
            return {"loss": loss, "tracked": self.tracker.result()}

    losses: list[Callable[[Any, Any, Any, Any], Any]] = [
        lambda own, x, y, p: own.compute_loss(x, y, p) + 0.01 * ops.sum(p**2) + own.factor**2,
        lambda own, x, y, p: ops.mean((y - p) ** 2) + sum(own.losses) + own.factor**2,
        lambda own, x, y, p: ops.exp(-own.factor) * 0.01 * ops.sum((y - p) ** 2) + own.factor,
        lambda own, x, y, p: own.optimizer.scale_loss(0.01 * own.factor * ops.sum((y - p) ** 2)) / 2,
    ]
    for number, loss in enumerate(losses):
        x, y = rows(("ragged", "even")[number % 2])

        def script(batch: int, x: Any = x, y: Any = y, loss: Any = loss) -> dict[str, Any]:
            model = Beside(loss)
            model.compile(keras.optimizers.SGD(0.01), "mse")
            # TensorFlow traces a step that makes variables twice, and `note` would keep what it has of the first trace.
            model.optimizer.build(model.trainable_variables)
            return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

        silently_both(script)

    class Counts(ByHand):
        def train_step(self, data: Any) -> dict[str, Any]:
            self.tracker.update_state(ops.sum(ops.cast(data[1] > 0, "int32")))
            return {"tracked": self.tracker.result()}

    silently_both(by_hand(lambda: Counts(lambda y, p: ops.mean((y - p) ** 2))))


@feature
def losses_by_hand_that_branches_use_are_not_sent_there() -> None:
    """A branch that one rank takes alone would send a message alone, and what is made in it is of no use outside."""

    class Branching(ByHand):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = masked(y, self(x, training=True), y > 0)
            tf.cond(y[0, 0] > 0, lambda: (self.tracker.update_state(loss), 0)[1], lambda: 0)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"last": loss}

    said = told(lambda: Branching(lambda y, p: p), NO_MEAN)
    assert all("metric 'tracked'" in each for each in said), said


@feature
def losses_by_hand_behind_batch_normalization() -> None:
    """Synchronised; and what each rank normalizes by its own rows is no reason to tell of the loss."""

    def normalizing(loss: Callable[[Any, Any], Any], *, synchronized: bool) -> Callable[[], keras.Model]:
        def make() -> keras.Model:
            model = ByHand(loss)
            layers = [keras.layers.BatchNormalization(synchronized=synchronized), keras.layers.Dense(2)]
            model.net = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), *layers])
            deterministic_weights(model.net)
            return model

        return make

    for loss in (SUMS["squares"], SUMS["of a mean and a sum"], OF_MEANS["masked"], OF_MEANS["root"]):
        silently_both(by_hand(normalizing(loss, synchronized=True)))
    with logged(logging.WARNING) as said, kdist.scope(scale_lr=None):
        by_hand(normalizing(MEANS["of shares"], synchronized=False))(BATCH)
    assert not [text for text in said if NO_MEAN in text], said


@feature
def losses_by_hand_behind_messages() -> None:
    """What a layer combines over the ranks is known, over Horovod, too, whose operations do not say that they act."""

    class Centers(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x - 0.1 * kdist.all_reduce(ops.sum(x, axis=0)) + kdist.all_reduce(ops.mean(x, axis=0), "mean")

    def behind(loss: Callable[[Any, Any], Any]) -> Callable[[], keras.Model]:
        def make() -> keras.Model:
            model = ByHand(loss)
            adds = Adds(lambda x: ops.sum(x * (ops.exp(x) / ops.sum(ops.exp(x), axis=0))), "adds")
            model.net = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2), Centers(), adds])
            deterministic_weights(model.net)
            return model

        return make

    for loss in (SUMS["squares"], OF_MEANS["masked"], OF_ROWS["contrastive"]):
        silently_both(by_hand(behind(loss)))


@feature
def losses_that_relate_rows_behind_other_layers() -> None:
    """Recurrent layers, which loop over time steps first, with a mask and without; attention; time steps as rows."""
    x, y = sequences()

    def pairs(y: Any, p: Any) -> Any:
        flat = ops.tanh(ops.reshape(p, (ops.shape(p)[0], -1)))
        return ops.mean(ops.log_softmax(ops.matmul(flat, ops.transpose(flat)))) + ops.mean((p - y) ** 2)

    class Attends(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x + ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x, (0, 2, 1)))), x)

    for mask, make in (
        (True, lambda: keras.layers.LSTM(3, return_sequences=True)),
        (False, lambda: keras.layers.GRU(3, return_sequences=True)),
        (False, Attends),
    ):

        def script(batch: int, mask: bool = mask, make: Any = make) -> dict[str, Any]:
            model = ByHand(pairs)
            embedding = keras.layers.Embedding(9, 4, mask_zero=mask)
            model.net = keras.Sequential([keras.Input((6,), dtype="int64"), embedding, make(), keras.layers.Dense(1)])
            deterministic_weights(model.net)
            model.compile(keras.optimizers.SGD(0.1))
            return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

        silently_both(script)


@feature
def losses_by_hand_in_eager_steps_are_told_of() -> None:
    class Eager(ByHand):
        def compile(self, *args: Any, **kwargs: Any) -> None:
            super().compile(*args, run_eagerly=True, **kwargs)

    said = told(lambda: Eager(SUMS["squares"]), EAGER)
    assert len(said) == (kdist.rank() == 0), said


@feature
def steps_that_read_a_fixed_number_of_rows() -> None:
    """They are traced with it: a mean by it is exact, and a sum is told of."""

    def reads(loss: Callable[[Any, Any], Any]) -> Callable[[], keras.Model]:
        def of_fixed(y: Any, p: Any) -> Any:
            assert isinstance(y.shape[0], int)
            return loss(y, p)

        return lambda: ByHand(of_fixed)

    silently_both(by_hand(reads(lambda y, p: ops.sum((y - p) ** 2) / y.shape[0]), "even"))
    number = kdist.size() * 7  # what is divided by must not look like a rank's number of rows
    x, y = (np.resize(each, (number, each.shape[1])) for each in rows("even"))
    told(reads(lambda y, p: 0.3 * ops.sum((y - p) ** 2) / y.shape[1]), FIXED_NUMBER, (x, y), batch_size=number)


@feature
def losses_by_hand_that_are_no_means_are_told_of() -> None:
    for number, loss in enumerate(OTHERS.values()):
        told(models_of(loss)[number % 3], NO_MEAN)


@feature
def gradients_of_what_relates_rows_are_told_of() -> None:
    """A penalty on gradients, of which no tape has recorded how they are computed for all ranks."""

    class Penalized(ByHand):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = self.own_loss(y, self(x, training=True))
                gradients = inner.gradient(loss, self.trainable_variables)
                loss = loss + 0.1 * tf.add_n([tf.reduce_sum(each**2) for each in gradients])
            gradients = outer.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"tracked": self.tracker.result()}

    for loss in (OF_ROWS["contrastive"], OF_MEANS["root"]):
        told(lambda loss=loss: Penalized(loss), NO_MEAN)


@feature
def losses_by_hand_of_a_written_number_of_rows_are_told_of() -> None:
    x, y = (np.resize(each, (24, each.shape[1])) for each in rows("even"))
    for number, loss in enumerate(OF_A_WRITTEN_NUMBER.values()):
        told(models_of(loss)[number], NO_MEAN, (x, y), batch_size=12)


@feature
def losses_by_hand_of_what_has_no_rows() -> None:
    """A table and a factor in each element of the data, which are those of each rank."""

    class WithTable(ByHand):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y, (table, factor) = data
            with tf.GradientTape() as tape:
                logits = ops.matmul(self(x, training=True), ops.transpose(table))
                loss = ops.logsumexp(logits * ops.cast(factor, logits.dtype)) + ops.max(y)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"last": loss}

    x, y = rows("even")

    def script(batch: int) -> dict[str, Any]:
        model = WithTable(lambda y, p: p)
        model.compile(keras.optimizers.SGD(0.01))
        table = tf.constant([[1.0, 2.0], [-1.0, 0.5], [0.3, -2.0]], x.dtype)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
        return outcome(model, model.fit(data.map(lambda a, b: (a, b, (table, tf.constant(3)))), epochs=2, verbose=0))

    silently_both(script)


@feature
def logs_and_metrics_by_hand() -> None:
    class Measures(ByHand):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.own_loss(y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            total = ops.sum(ops.abs(y))
            self.tracker.update_state(total)
            of_told = {"mean": total / ops.cast(ops.shape(y)[0], total.dtype), "twice": 2 * total}
            norm = tf.linalg.global_norm(gradients)
            return {"loss": loss, "norm": norm, "tracked": self.tracker.result(), **of_told}

    silently_both(by_hand(lambda: Measures(lambda y, p: ops.mean((y - p) ** 2))))

    class MeasuresInPython(Measures):
        def train_step(self, data: Any) -> dict[str, Any]:
            logs = super().train_step(data)
            return {**logs, "norm": of_python(logs["norm"])}

    x, y = rows("ragged")
    with logged(logging.WARNING) as said, kdist.scope(scale_lr=None):
        model = MeasuresInPython(lambda y, p: ops.mean((y - p) ** 2))
        model.compile("sgd")
        model.fit(x, y, batch_size=BATCH, verbose=0)
    names = [text[: text.index(" is computed")] for text in said if " is computed" in text]
    assert names == (["The log 'norm' of the step"] if kdist.rank() == 0 else []), said

    class Counts(Measures):
        def train_step(self, data: Any) -> dict[str, Any]:
            return {name: value for name, value in super().train_step(data).items() if name != "norm"}

    silently_both(by_hand(lambda: Counts(lambda y, p: ops.mean((y - p) ** 2)), "even"))


@feature
def integers_among_logs() -> None:
    class Counts(ByHand):
        def train_step(self, data: Any) -> dict[str, Any]:
            large = tf.math.count_nonzero(ops.abs(data[1]) > 0.5)
            most = ops.max(ops.sum(ops.cast(data[0] > 0, "int32"), axis=1))
            return {**super().train_step(data), "large": large, "most": most, "twice": 2 * large + 1}

    silently_both(by_hand(lambda: Counts(lambda y, p: ops.mean((y - p) ** 2))))


@feature
def nothing_is_told_of_gradients_as_they_are() -> None:
    """Those of a recurrent layer are sums of products of rows, which a step passes on."""

    class PassesOn(keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(data[0], data[1], self(data[0], training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    x, y = sequences()
    for make in (keras.Sequential, PassesOn):

        def script(batch: int, make: type[keras.Sequential] = make) -> dict[str, Any]:
            layers = [keras.layers.GRU(3, return_sequences=True), keras.layers.Dense(1)]
            model = make([keras.Input((6,), dtype="int64"), keras.layers.Embedding(9, 4, mask_zero=True), *layers])
            model.compile(keras.optimizers.SGD(0.1), "mse")
            return fit_alone(model, fed("arrays", (x, y), batch))

        silently_both(script)


@feature
def checks_of_losses_by_hand_change_nothing() -> None:
    """What a nested function writes is not written by a check; draws of each row, and weighted means, are no news."""

    class Writes(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.kept = self.add_weight(shape=(3,), initializer="zeros", trainable=False, aggregation="mean")

        @tf.function
        def write(self, x: Any) -> Any:
            self.kept.value.scatter_nd_add([[0]], [tf.reduce_sum(tf.abs(x))])
            return x

        def call(self, x: Any) -> Any:
            return self.write(x)

    class Draws(ByHand):
        def __init__(self) -> None:
            super().__init__(lambda y, p: ops.mean((y - p) ** 2))
            self.writes, self.seeds = Writes(), keras.random.SeedGenerator(0)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            steps = keras.random.randint((ops.shape(x)[0], 1), 1, 3, seed=self.seeds)
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.cast(steps, x.dtype) * (y - self(self.writes(0.0 * x), training=True)) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            mask = ops.cast(y > 0, y.dtype)
            self.tracker.update_state(ops.sum(mask * y) / ops.sum(mask), sample_weight=ops.sum(mask))
            return {"tracked": self.tracker.result()}

    x, y = rows("ragged")
    with logged(logging.WARNING) as said, kdist.scope(scale_lr=None):
        model = Draws()
        model.compile("sgd")
        model.fit(x, y, batch_size=BATCH, verbose=0)
        kept = np.asarray(model.writes.kept)
    assert not kept.any(), kept
    assert not [text for text in said if NO_MEAN in text], said


@feature
def predict_functions_of_the_users_own() -> None:
    """Keras calls `make_predict_function` without arguments."""

    class Own(keras.Sequential):
        def make_predict_function(self) -> Any:
            return super().make_predict_function()

    x, _ = rows("even")

    def script(batch: int) -> dict[str, Any]:
        model = Own([keras.Input((5,)), keras.layers.Dense(2)])
        deterministic_weights(model)
        return {"predictions": [model.predict(x, batch_size=batch, verbose=0), model.predict_on_batch(x)]}

    both(script)


class WithInputs(keras.Model):
    """Differentiates a loss by its weights and by its inputs, as adversarial training does."""

    def __init__(self, loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self.net, self.own_loss = mlp(), loss

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.own_loss(ops.square(self(x) - y))
        *gradients, _ = tape.gradient(loss, [*(each.value for each in self.trainable_variables), x])
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@feature
def sums_that_a_step_differentiates_by_other_sources() -> None:
    x, y = rows("ragged")
    for loss, is_told in ((ops.sum, True), (ops.mean, False)):
        with logged(logging.WARNING) as said, kdist.scope(scale_lr=None):
            model = WithInputs(loss)
            model.compile(keras.optimizers.SGD(0.01))
            model.fit(x, y, batch_size=BATCH, verbose=0)
        found = [text for text in said if "is no mean over this rank's rows" in text]
        assert len(found) == (is_told and kdist.rank() == 0), said


@feature
def losses_of_keras_by_hand_behind_dropout() -> None:
    """What is drawn differs from one process. Nothing is told of means of it, nor of a sum of two, as of a GAN."""
    x, y = rows("ragged")
    by_hand = {"a mean": lambda loss, y, p: loss(y, p), "two means": lambda loss, y, p: loss(y, p) + loss(0 * p, p)}
    for compute in by_hand.values():
        with logged(logging.WARNING) as said, kdist.scope(scale_lr=None):
            model = ByHand(functools.partial(compute, keras.losses.MeanSquaredError()))
            model.net = keras.Sequential([keras.layers.Dense(6), keras.layers.Dropout(0.3), keras.layers.Dense(2)])
            model.compile(keras.optimizers.SGD(0.01))
            model.fit(x, y, batch_size=BATCH, verbose=0)
        assert not [text for text in said if any(each in text for each in TOLD)], said
