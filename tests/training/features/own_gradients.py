"""Gradients that a step of the user's own clips, scales, measures or computes by hand before it applies them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import ops

import kdist
from tests.helpers.logs import logged
from tests.training.features.own_losses import NO_MEAN, silently_both
from tests.training.features.pairs import compiled
from tests.training.features.registry import feature
from tests.training.fidelity import BATCH, deterministic_weights, mlp, sequences


class Uses(keras.Model):
    """A step of Keras' guide that does something with its gradients."""

    def __init__(
        self, use: Callable[[Any], Any], *, net: Any = None, scales: bool = False, penalty: float = 0.0
    ) -> None:
        super().__init__()
        self.net, self.use, self.scales, self.penalty = net or mlp(), use, scales, penalty
        self.norms = keras.metrics.Mean(name="norms")

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, *_ = data
        weights = self.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = scaled = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
                if self.scales:
                    scaled = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, weights)
            penalized = loss + sum(self.penalty * tf.reduce_sum(each**2) for each in gradients if self.penalty)
        norm = tf.linalg.global_norm(gradients)
        if self.penalty:
            gradients = outer.gradient(penalized, weights)
        self.optimizer.apply_gradients(zip(self.use(gradients), weights, strict=True))
        self.norms.update_state(norm)
        of_bias = {
            "largest": ops.max(ops.abs(gradients[-1])),
            "first": gradients[-1][0],
            "mean": ops.mean(gradients[-1]),
        }
        return {"norms": self.norms.result(), "norm": norm, "last": loss, **of_bias}


USES: dict[str, Callable[[Any], Any]] = {
    "clipped by the norm of all": lambda gradients: tf.clip_by_global_norm(gradients, 0.5)[0],
    "clipped one by one": lambda gradients: [tf.clip_by_norm(each, 0.2) for each in gradients],
    "of one length": lambda gradients: [each / (1e-6 + tf.norm(each)) for each in gradients],
    "signs": lambda gradients: [0.1 * tf.sign(each) for each in gradients],
    "with a decay": lambda gradients: [0.5 * each + 0.01 for each in gradients],
}


@feature
def gradients_that_a_step_clips_or_measures() -> None:
    clip = USES["clipped by the norm of all"]
    silently_both(compiled(lambda: Uses(clip), loss="mse"))
    silently_both(compiled(lambda: Uses(lambda gradients: gradients, penalty=0.1), loss="mse"))


@feature
def gradients_that_a_step_uses_in_other_ways() -> None:
    for number, (name, use) in enumerate(USES.items()):
        try:
            silently_both(
                compiled(
                    lambda use=use, n=number: Uses(use, scales=n % 2 == 0), ("ragged", "even")[number % 2], loss="mse"
                )
            )
        except AssertionError as error:
            raise AssertionError(name) from error


@feature
def sparse_gradients_that_a_step_clips_are_told_of() -> None:
    x, y = sequences()
    with logged(logging.WARNING) as said, kdist.scope(scale_lr=None):
        layers = [keras.layers.Embedding(9, 4), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
        net = keras.Sequential([keras.Input((6,), dtype="int64"), *layers])
        model = Uses(USES["clipped by the norm of all"], net=net)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0)
    told = [text for text in said if "applies gradients that it computes from this rank's" in text or NO_MEAN in text]
    names = [re.split(" (?:is|applies) ", text)[0] for text in told]
    expected = ["The step of Uses", "What the metric 'norms'"]
    assert names == (expected if kdist.rank() == 0 else []), said


class Own(keras.Model):
    """A step that applies gradients of its own.

    Args:
        gradients: callable that takes the model and a batch, and returns the gradients of its weights.
        net: `keras.Model`.
    """

    def __init__(self, gradients: Callable[[Any, Any, Any], list[Any]], net: Any = None) -> None:
        super().__init__()
        self.net, self.gradients = net or mlp(), gradients

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, *_ = data
        gradients = self.gradients(self, x, y)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"error": tf.reduce_mean((self(x) - y) ** 2)}


def clipped_rows(gradients: list[Any]) -> list[Any]:
    """Returns gradients of each row, each clipped by its norm."""
    return [tf.clip_by_norm(each, 0.3, axes=list(range(1, each.shape.rank))) for each in gradients]


def by_jacobian(model: Any, x: Any, y: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        losses = tf.reduce_mean((model(x, training=True) - y) ** 2, axis=-1)
    return clipped_rows(tape.jacobian(losses, model.trainable_variables))


def by_map(model: Any, x: Any, y: Any) -> list[Any]:
    def of_row(row: tuple[Any, Any]) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(row[0][tf.newaxis], training=True) - row[1]) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    return clipped_rows(tf.vectorized_map(of_row, (x, y)))


def surgery(model: Any, x: Any, y: Any) -> list[Any]:
    """PCGrad: the gradient of one loss, without what goes against that of another."""
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        root = tf.sqrt(tf.reduce_mean((predicted - y) ** 2))  # no mean over rows
        losses = tf.stack([root, tf.reduce_mean(tf.abs(predicted)), 0.01 * tf.reduce_sum(predicted)])
    found = tape.jacobian(losses, model.trainable_variables)
    flat = tf.concat([tf.reshape(each, [3, -1]) for each in found], 1)
    against = tf.minimum(tf.reduce_sum(flat[0] * flat[1]) / tf.reduce_sum(flat[1] ** 2), 0.0)
    return [each[0] - against * each[1] + each[2] for each in found]


def linear() -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    deterministic_weights(model)
    return model


def without_a_tape(model: Any, x: Any, y: Any) -> list[Any]:
    error = model(x) - y
    return [0.1 * tf.matmul(x, error, transpose_a=True), tf.reduce_sum(error, 0)]


def hebbian(model: Any, x: Any, y: Any) -> list[Any]:
    active = model(x)
    related = tf.matmul(x, active, transpose_a=True) / tf.cast(tf.shape(x)[0], x.dtype)
    return [related / (0.1 + tf.norm(related)), tf.reduce_max(active - y, 0)]


@feature
def gradients_of_each_row() -> None:
    silently_both(
        compiled(lambda: Own(lambda *batch: [tf.reduce_mean(each, 0) for each in by_jacobian(*batch)]), loss="mse")
    )
    silently_both(
        compiled(
            lambda: Own(lambda *batch: [tf.reduce_sum(each, 0) / 9 for each in by_map(*batch)]), "even", loss="mse"
        )
    )


@feature
def gradients_of_several_losses_at_once() -> None:
    silently_both(compiled(lambda: Own(surgery), loss="mse"))


@feature
def gradients_that_no_tape_computes() -> None:
    for gradients in (without_a_tape, hebbian):
        silently_both(compiled(lambda by=gradients: Own(by, net=linear()), loss="mse"))


def with_the_inputs(model: Any, x: Any, y: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
    *gradients, _ = tape.gradient(loss, [*(each.value for each in model.trainable_variables), x])
    return gradients


def in_two_parts(model: Any, x: Any, y: Any) -> list[Any]:
    with tf.GradientTape(persistent=True) as tape:
        predicted = model(x, training=True)
        loss = model.compute_loss(x=x, y=y, y_pred=predicted)
    by_predicted = tape.gradient(loss, predicted)
    return tape.gradient(predicted, model.trainable_variables, output_gradients=by_predicted)


def in_three_parts(model: Any, x: Any, y: Any) -> list[Any]:
    """By the chain rule, with what is computed from a part."""
    with tf.GradientTape(persistent=True) as tape:
        hidden = 2 * x
        tape.watch(hidden)
        predicted = model(hidden, training=True)
        squares = (predicted - y) ** 2
        loss = model.compute_loss(x=x, y=y, y_pred=predicted)
    by_squares = tape.gradient(loss, predicted) / (2 * (predicted - y)) + 0.01
    by_predicted = tape.gradient(squares, predicted, output_gradients=by_squares)
    return tape.gradient(predicted, model.trainable_variables, output_gradients=0.5 * by_predicted)


def in_a_function(model: Any, x: Any, y: Any) -> list[Any]:
    @tf.function
    def of(x: Any, y: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = 0.1 * tf.reduce_sum((model(x, training=True) - y) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    return of(x, y)


@feature
def gradients_that_have_the_share_in_them() -> None:
    for gradients in (with_the_inputs, in_two_parts, in_three_parts, in_a_function):
        silently_both(compiled(lambda by=gradients: Own(by), loss="mse"))


class Adversarial(keras.Model):
    """Trains on rows that are moved by the gradient of a loss, and penalizes that gradient."""

    def __init__(self, loss: Callable[[Any, Any, Any], Any], penalty: float = 10.0) -> None:
        super().__init__()
        self.net, self.own_loss, self.penalty = mlp(), loss, penalty
        self.factor = tf.Variable(0.7, trainable=False, dtype="float64")

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = self.own_loss(self, x, y)
            by_rows = tape.gradient(loss, x)
            last = self.own_loss(self, x + 5 * by_rows, y)
            if self.penalty:
                last += self.penalty * ops.mean(ops.sum(by_rows**2, axis=1))
        gradients = outer.gradient(last, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"first": loss, "last": last}


def of_compile(model: Any, x: Any, y: Any) -> Any:
    return model.compute_loss(x, y, model(x, training=True))


def of_model(model: Any, x: Any, y: Any) -> Any:
    return ops.mean((model(x, training=True) - y) ** 2)


def root(y: Any, p: Any) -> Any:
    return ops.sqrt(ops.mean((y - p) ** 2))


@feature
def gradients_by_the_inputs() -> None:
    """Their scale is that of a mean over the rows of all ranks."""
    for make, loss in (
        (lambda: Adversarial(of_compile), "mse"),
        (lambda: Adversarial(of_compile, penalty=0.0), root),
        (lambda: Adversarial(of_model), "mse"),
        (lambda: Adversarial(lambda *args: of_compile(*args) + of_model(*args)), "mae"),
        (lambda: Adversarial(lambda model, *data: model.factor * of_compile(model, *data), penalty=0.0), "mse"),
    ):
        silently_both(compiled(make, loss=loss))


@feature
def gradients_by_the_inputs_of_losses_and_rows() -> None:
    class OfBoth(Adversarial):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                tape.watch(x)
                predicted = self(x, training=True)
                loss = self.compute_loss(x, y, predicted)
            by_rows = tape.gradient([loss, predicted], x)
            with tf.GradientTape() as tape:
                loss = self.own_loss(self, x + by_rows, y)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    silently_both(compiled(lambda: OfBoth(of_compile), loss="mse"))


@feature
def steps_that_their_loss_skips() -> None:
    class Skips(Adversarial):
        def train_step(self, data: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss = self.own_loss(self, *data)
            counts = ops.cast(loss < 5.0, loss.dtype)
            gradients = [each * counts for each in tape.gradient(loss, self.trainable_variables)]
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss, "counts": counts}

    for loss in (of_compile, of_model):
        silently_both(compiled(lambda loss=loss: Skips(loss), loss="mse"))
