"""Losses that a layer, `compute_loss` or `train_step` computes by hand: sums over rows, means, and others."""

from __future__ import annotations

import contextlib
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
    size,
)

RELATES = "It is none, and no sum"
DIVIDES = "divides a sum over this rank's rows by a constant"
CHANGES = "what it has computed from gradients of this rank's rows"
WRITES = "the step writes the weight"


def told(script: Callable[[int], dict[str, Any]], what: str | None) -> None:
    """Trains on all ranks, which must be told of a loss that is no mean over rows, or of nothing."""
    with (
        logged(logging.WARNING) as said,
        kdist.scope(scale_lr=None),
        contextlib.suppress(NotSynchronizedError),  # of weights that were written and rounded
    ):
        script(BATCH)
    found = [text for text in said if any(each in text for each in (RELATES, DIVIDES, CHANGES, WRITES))]
    is_told = what is not None and kdist.rank() == 0
    assert bool(found) == is_told, said
    assert what is None or all(what in text for text in found), said


class Adds(keras.layers.Layer):
    """Adds a loss of its input, as Keras' guides do."""

    def __init__(self, loss: Callable[[Any], Any]) -> None:
        super().__init__(name="adds")
        self.loss = loss

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.loss(inputs))
        return inputs


def row_count(x: Any) -> Any:
    return ops.cast(ops.shape(x)[0], x.dtype)


ADDED: dict[str, Callable[[Any], Any]] = {
    "a sum": lambda x: 1e-2 * ops.sum(x**2),
    "a number for each row": lambda x: ops.sum(x**2, axis=1),
    "a column": lambda x: ops.sum(x**2, axis=1, keepdims=True),
    "half of a sum of squares": tf.nn.l2_loss,
    "a mean of sums": lambda x: ops.mean(ops.sum(x**2, axis=1)),
    "a sum of means": lambda x: ops.sum(ops.mean(x**2, axis=0)),
    "a sum over the number of rows": lambda x: ops.sum(x**2) / row_count(x),
    "a sum of shares": lambda x: ops.sum(x**2 / row_count(x)),
    "a sum of chosen rows": lambda x: ops.sum(tf.boolean_mask(x, x[:, 0] > 0) ** 2),
    "a constant": lambda x: ops.sum(ops.ones((3,), x.dtype)),
}
NEITHER: dict[str, Callable[[Any], Any]] = {
    "a root": lambda x: ops.sqrt(ops.mean(x**2)),
    "products of means": lambda x: ops.mean(ops.mean(x, axis=0) * ops.mean(ops.abs(x), axis=0)),
    "a mean and a sum": lambda x: ops.mean(x**2) + ops.sum(x**2),
    "a mean of chosen rows": lambda x: ops.mean(tf.boolean_mask(x, x[:, 0] > 0) ** 2),
    "pairs": lambda x: ops.mean(ops.log_softmax(ops.matmul(x, ops.transpose(x)))),
    "correlations": lambda x: ops.sum((ops.matmul(ops.transpose(x), x) / row_count(x)) ** 2),
    "a variance": lambda x: ops.mean((x - ops.mean(x, axis=0)) ** 2),
}


def with_added(loss: Callable[[Any], Any], *, run_eagerly: bool = False) -> Callable[[int], dict[str, Any]]:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        layers = [keras.layers.Dense(4), Adds(loss), keras.layers.Dense(2, kernel_regularizer="l2")]
        model = keras.Sequential([keras.Input((5,)), *layers])
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=run_eagerly)
        return fit_alone(model, fed("arrays", (x, y), batch), validation_data=(x, y))

    return script


@feature
def losses_that_layers_add() -> None:
    for loss in ADDED.values():
        both(with_added(loss))
        told(with_added(loss), None)
    both(with_added(ADDED["a number for each row"], run_eagerly=True))


@feature
def added_losses_of_whole_batches_are_told_of() -> None:
    for loss in NEITHER.values():
        told(with_added(loss), "A loss of the layer 'adds' (`add_loss`) is computed from this rank's rows")


@feature
def ctc_losses_that_a_layer_adds() -> None:
    """The layer of the captcha example gives a loss for each row, of which Keras takes the sum."""

    class CTCLayer(keras.layers.Layer):
        def call(self, targets: Any, outputs: Any) -> Any:
            ones = ops.ones((ops.shape(targets)[0],), "int32")
            lengths = ones * ops.shape(targets)[1], ones * ops.shape(outputs)[1]
            loss = ops.nn.ctc_loss(ops.cast(targets, "int32"), outputs, *lengths, mask_index=4)
            self.add_loss(ops.expand_dims(ops.cast(loss, "float64"), 1))
            return outputs

    generator = np.random.default_rng(0)
    n = len(rows("ragged")[0])
    x, y = generator.normal(size=(n, 8, 3)), generator.integers(0, 4, size=(n, 3))

    def script(batch: int) -> dict[str, Any]:
        inputs, targets = keras.Input((8, 3)), keras.Input((3,))
        hidden = keras.layers.Bidirectional(keras.layers.LSTM(3, return_sequences=True))(inputs)
        model = keras.Model([inputs, targets], CTCLayer()(targets, keras.layers.Dense(5)(hidden)))
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.01))
        return outcome(model, model.fit([x, y], batch_size=batch, epochs=2, shuffle=False, verbose=0))

    both(script, rtol=1e-5)  # TensorFlow computes it in float32


SUMS: dict[str, Callable[[Any, Any], Any]] = {
    "squares": lambda y, p: 0.01 * ops.sum((y - p) ** 2),
    "of Keras' loss": lambda y, p: keras.losses.MeanSquaredError(reduction="sum")(y, p),
    "over rows": lambda y, p: keras.losses.MeanSquaredError(reduction="sum")(y, p) / row_count(p),
    "mean of Keras' loss": lambda y, p: keras.losses.MeanSquaredError()(y, p),
    "of gathered sums": lambda y, p: 0.01 * kdist.all_reduce(ops.sum((y - p) ** 2)),
    "root of gathered means": lambda y, p: ops.sqrt(kdist.all_reduce(ops.mean((y - p) ** 2), "mean")),
}
OF_WHOLE_BATCHES: dict[str, Callable[[Any, Any], Any]] = {
    "root": lambda y, p: ops.sqrt(ops.mean((y - p) ** 2)),
    "masked": lambda y, p: ops.sum((y - p) ** 2 * ops.cast(y > 0, p.dtype)) / ops.sum(ops.cast(y > 0, p.dtype)),
    "contrastive": lambda y, p: ops.mean(ops.log_softmax(ops.matmul(y, ops.transpose(p)))),
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
        x, y = data
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


def by_hand(make: Callable[[], keras.Model], **compile_: Any) -> Callable[[int], dict[str, Any]]:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = make()
        model.compile(keras.optimizers.SGD(0.01), **compile_)
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
def sums_that_a_step_differentiates() -> None:
    for loss in SUMS.values():
        for make in models_of(loss):
            both(by_hand(make))
            told(by_hand(make), None)


@feature
def a_loss_for_each_row_that_a_step_differentiates() -> None:
    """As the triplet loss of Keras' siamese network: a tape takes the sum."""

    class OfRows(ByHand):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = keras.losses.mean_squared_error(y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.tracker.update_state(loss)
            return {"tracked": self.tracker.result()}

    both(by_hand(lambda: OfRows(keras.losses.mean_squared_error)))


@feature
def losses_by_hand_of_whole_batches_are_told_of() -> None:
    for loss in OF_WHOLE_BATCHES.values():
        for make in models_of(loss):
            told(by_hand(make), RELATES)
    of_batch_size = [lambda y, p: ops.sum((y - p) ** 2) / BATCH, lambda y, p: ops.sum((y - p) ** 2) * (1 / BATCH)]
    for loss in of_batch_size:
        told(by_hand(lambda loss=loss: ByHand(loss)), DIVIDES)


@feature
def sums_over_rows_that_metrics_are_given() -> None:
    class Counts(ByHand):
        def train_step(self, data: Any) -> dict[str, Any]:
            hits = keras.metrics.binary_accuracy(data[1], data[0][:, :2])
            self.tracker.update_state(ops.sum(hits) + 0)
            self.counted.update_state(ops.shape(hits)[0])
            return {"tracked": self.tracker.result(), "counted": self.counted.result()}

        @property
        def metrics(self) -> list[Any]:
            return [self.tracker, self.counted]

    def make() -> keras.Model:
        model = Counts(lambda y, p: ops.mean((y - p) ** 2))
        model.counted = keras.metrics.Mean(name="counted")
        return model

    x, y = rows("ragged")
    assert size() > 1

    def script(batch: int) -> dict[str, Any]:
        model = make()
        model.compile()
        return {"history": model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0).history}

    both(script)


GRADIENTS: dict[str, tuple[Callable[[list[Any]], list[Any]], str | None]] = {
    "scaled": (lambda gradients: [0.5 * each for each in gradients], None),
    "centralized": (lambda gradients: [each - ops.mean(each, axis=0, keepdims=True) for each in gradients], None),
    "clipped by all": (lambda gradients: tf.clip_by_global_norm(gradients, 0.01)[0], CHANGES),
    "clipped by norm": (lambda gradients: [tf.clip_by_norm(each, 0.01) for each in gradients], CHANGES),
    "clipped by value": (lambda gradients: [tf.clip_by_value(each, -0.1, 0.1) for each in gradients], CHANGES),
    "clipped globally": (
        lambda gradients: tf.clip_by_global_norm(kdist.all_reduce(gradients, "mean"), 0.01)[0],
        None,
    ),
}


@feature
def what_a_step_does_with_gradients() -> None:
    class Changes(ByHand):
        def __init__(self, change: Callable[[list[Any]], list[Any]]) -> None:
            super().__init__(lambda y, p: ops.mean((y - p) ** 2))
            self.change = change

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.own_loss(y, self(x, training=True))
            gradients = self.change(tape.gradient(loss, self.trainable_variables))
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    for change, what in GRADIENTS.values():

        def make(change: Callable[[list[Any]], list[Any]] = change) -> keras.Model:
            return Changes(change)

        told(by_hand(make), what)
        if what is None:
            both(by_hand(make))


@feature
def weights_that_a_step_writes_by_its_rows_are_told_of() -> None:
    class SharpnessAware(ByHand):
        def __init__(self, reduce: Callable[[Any], Any]) -> None:
            super().__init__(lambda y, p: ops.mean((y - p) ** 2))
            self.reduce = reduce

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.own_loss(y, self(x, training=True))
            steps = [0.1 * each for each in self.reduce(tape.gradient(loss, self.trainable_variables))]
            for weight, step in zip(self.trainable_variables, steps, strict=True):
                weight.assign_add(step)
            with tf.GradientTape() as tape:
                loss = self.own_loss(y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            for weight, step in zip(self.trainable_variables, steps, strict=True):
                weight.assign_sub(step)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    def all_ranks(gradients: Any) -> Any:
        return kdist.all_reduce(gradients, "mean")

    told(by_hand(lambda: SharpnessAware(lambda gradients: gradients)), WRITES)
    told(by_hand(lambda: SharpnessAware(all_ranks)), None)
    both(by_hand(lambda: SharpnessAware(all_ranks)))


@feature
def logs_and_metrics_of_whole_batches_are_told_of() -> None:
    class Measures(ByHand):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.own_loss(y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.tracker.update_state(ops.max(ops.abs(y)))
            return {"loss": loss, "norm": tf.linalg.global_norm(gradients), "tracked": self.tracker.result()}

    x, y = rows("ragged")
    with logged(logging.WARNING) as said, kdist.scope(scale_lr=None):
        model = Measures(lambda y, p: ops.mean((y - p) ** 2))
        model.compile("sgd")
        model.fit(x, y, batch_size=BATCH, verbose=0)
    names = [text[: text.index(" is computed")] for text in said]
    expected = ["What the metric 'tracked' is given", "The log 'norm' of the step"]
    assert names == (expected if kdist.rank() == 0 else []), said


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
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
            return fit_alone(model, fed("arrays", (x, y), batch))

        told(script, None)
