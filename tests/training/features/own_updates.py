"""Weights that a step of the user's own, or a layer, writes by its rows: by a rule of its own, or for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import ops

import kdist
from tests.training.features.own_losses import ByHand, by_hand, silently_both
from tests.training.features.registry import feature
from tests.training.fidelity import deterministic_weights, fed, fit_alone, rows

LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda y, p: ops.mean((y - p) ** 2),
    "sum": lambda y, p: 0.05 * ops.sum((y - p) ** 2),
    "root": lambda y, p: ops.sqrt(ops.mean((y - p) ** 2)),
}


class Ruled(ByHand):
    """Updates its weights without an optimizer."""

    def __init__(self, loss: Callable[[Any, Any], Any], write: Callable[[Any, Any], Any]) -> None:
        super().__init__(loss)
        self.write = write

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.own_loss(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        for weight, gradient in zip(self.trainable_variables, gradients, strict=True):
            self.write(weight, gradient)
        return {"last": loss}


RULES: dict[str, Callable[[Any, Any], Any]] = {
    "descent": lambda weight, gradient: weight.assign_sub(0.01 * gradient),
    "signs": lambda weight, gradient: weight.assign_sub(0.01 * ops.sign(gradient)),
    "steps of one length": lambda weight, gradient: weight.assign(weight - 0.01 * gradient / ops.norm(gradient)),
}


class SharpnessAware(ByHand):
    """Climbs for a while before it takes the gradient."""

    def __init__(self, loss: Callable[[Any, Any], Any], reduce: Callable[[Any], Any]) -> None:
        super().__init__(loss)
        self.reduce = reduce

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.own_loss(y, self(x, training=True))
        gradients = self.reduce(tape.gradient(loss, weights))
        norm = tf.linalg.global_norm(gradients)
        steps = [0.1 * each / norm for each in gradients]
        for weight, step in zip(weights, steps, strict=True):
            weight.assign_add(step)
        with tf.GradientTape() as tape:
            loss = self.own_loss(y, self(x, training=True))
        gradients = tape.gradient(loss, weights)
        for weight, step in zip(weights, steps, strict=True):
            weight.assign_sub(step)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"last": loss, "norm": norm}


class OfFirstBatch(keras.layers.Layer):
    """Begins with the statistics of the first batch, as ActNorm does."""

    def build(self, shape: Any) -> None:
        self.shift = self.add_weight(shape=(shape[-1],), initializer="zeros")
        self.is_begun = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.shift.assign(ops.where(self.is_begun > 0, self.shift, -ops.mean(inputs, 0)))
        self.is_begun.assign(1.0)
        return inputs + self.shift


@feature
def updates_without_an_optimizer() -> None:
    for loss in LOSSES.values():
        for rule in RULES.values():
            silently_both(by_hand(lambda loss=loss, rule=rule: Ruled(loss, rule)))


@feature
def sharpness_aware_minimization() -> None:
    """As its authors write it, and with means over all ranks that the step computes."""

    def mean(gradients: Any) -> Any:
        return kdist.all_reduce(gradients, "mean")

    for loss in LOSSES.values():
        silently_both(by_hand(lambda loss=loss: SharpnessAware(loss, lambda gradients: gradients)))
    silently_both(by_hand(lambda: SharpnessAware(LOSSES["mean"], mean)))


@feature
def weights_that_a_layer_sets_by_the_first_batch() -> None:
    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential([keras.Input((5,)), OfFirstBatch(), keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return fit_alone(model, fed("arrays", rows("ragged"), batch))

    silently_both(script)
