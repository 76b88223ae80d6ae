"""Losses by hand that are computed in functions (`tf.function`), of which all but the call is a step's own graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tests.training.features.own_losses import (
    NO_MEAN,
    ByHand,
    by_hand,
    masked,
    own_gradient,
    silently_both,
    told,
    train_each,
)
from tests.training.features.registry import feature
from tests.training.fidelity import deterministic_weights, rows

ROW = rows("ragged")[1][3]


@tf.function
def contrastive(one: Any, other: Any) -> Any:
    logits = ops.matmul(one, ops.transpose(other))
    return ops.mean(
        keras.losses.sparse_categorical_crossentropy(ops.arange(ops.shape(one)[0]), logits, from_logits=True)
    )


@tf.function
def unit(rows: Any) -> Any:
    return rows / (1 + tf.norm(rows, axis=1, keepdims=True))


@tf.function
def nested(one: Any, other: Any) -> tuple[Any, Any]:
    one, other = unit(one), unit(other)
    return contrastive(one, other), ops.mean(one * other)


@tf.function
def of_rows(rows: Any) -> tuple[Any, Any]:
    """Rows that relate to each other, and some that do not."""
    return rows - ops.max(rows, axis=0), rows**2


@tf.function
def branched(y: Any, p: Any) -> Any:
    if tf.reduce_sum(y) > 1e6:
        return ops.mean(p)
    total = tf.zeros((), p.dtype)
    for column in tf.range(2):
        total += ops.max((y - p)[:, column] ** 2)
    return total


@tf.function
def root(y: Any, p: Any) -> Any:
    return ops.sqrt(ops.mean((y - p) ** 2))


@tf.function
def of_own_gradient(x: Any) -> Any:
    return own_gradient(x)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "contrastive": lambda y, p: contrastive(y, p),
    "of nested functions": lambda y, p: sum(nested(y, p)),
    "called for what it returns": lambda y, p: root(ops.mean((y - p) ** 2, keepdims=True), contrastive(y, p)),
    "rows that a function relates": lambda y, p: ops.mean(of_rows(y - p)[0] ** 2) + ops.mean(of_rows(p)[1]),
    "rows of a function": lambda y, p: ops.mean(ops.log_softmax(ops.matmul(unit(y), ops.transpose(unit(p))))),
    "branches and loops": lambda y, p: branched(y, p),
    "a mask that made-up rows do not show": lambda y, p: tf.function(masked)(y, p, ops.not_equal(y, ROW)),
    "XLA": tf.function(lambda y, p: ops.logsumexp(ops.sum((y - p) ** 2, axis=1)), jit_compile=True),
    "a gradient of its own before": lambda y, p: contrastive(y, of_own_gradient(p)),
    "a sum in a function, beside a root": lambda y, p: 0.01 * tf.function(ops.sum)((y - p) ** 2) + root(y, p),
}


@feature
def losses_by_hand_in_functions() -> None:
    train_each(LOSSES, slice(None, None, 2))


@feature
def more_losses_by_hand_in_functions() -> None:
    train_each(LOSSES, slice(1, None, 2))


@feature
def losses_by_hand_in_functions_of_networks() -> None:
    """A factor that is learned, statistics, a layer's loss and a log that is computed in a function."""

    class Learned(ByHand):
        def __init__(self) -> None:
            super().__init__(lambda y, p: p)
            self.factor = self.add_weight(name="factor", initializer=keras.initializers.Constant(0.3))

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                p = self.net(x, training=True)
                loss = contrastive(self.factor * y, p) + 0.1 * root(y, p)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            norm = tf.function(lambda: ops.max(ops.sum((y - p) ** 2, axis=1)))
            return {"loss": loss, "worst": norm()}

    class Adds(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * contrastive(x, x))
            return x

    def adding() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2), Adds()])
        deterministic_weights(model)
        return model

    class Added(ByHand):
        def __init__(self) -> None:
            super().__init__(lambda y, p: root(y, p) + sum(self.net.losses))
            self.net = adding()

    class Normalizes(ByHand):
        def __init__(self) -> None:
            super().__init__(lambda y, p: contrastive(y, p))
            normalization = keras.layers.BatchNormalization(synchronized=True)
            self.net = keras.Sequential(
                [keras.Input((5,)), keras.layers.Dense(4), normalization, keras.layers.Dense(2)]
            )
            deterministic_weights(self.net)

    for make in (Learned, Added, Normalizes):
        silently_both(by_hand(make))


@feature
def losses_by_hand_in_functions_that_act() -> None:
    """What prints or draws is not looked into: a mean is no news, and what relates rows is told of."""

    @tf.function
    def printing(y: Any, p: Any) -> Any:
        tf.print("rows", tf.shape(p)[0], output_stream="file:///dev/null")
        return contrastive(y, p)

    @tf.function
    def drawing(y: Any, p: Any) -> Any:
        return contrastive(y, p) + 0.1 * tf.reduce_mean(tf.random.stateless_uniform((2,), (1, 2), dtype=p.dtype))

    @tf.function
    def printing_sum(y: Any, p: Any) -> Any:
        tf.print("rows", tf.shape(p)[0], output_stream="file:///dev/null")
        return 0.01 * tf.reduce_sum((y - p) ** 2)

    @tf.function
    def drawing_mean(y: Any, p: Any) -> Any:
        return tf.reduce_mean(tf.random.stateless_uniform((2,), (1, 2), dtype=p.dtype) * (y - p) ** 2)

    for loss in (printing, drawing):
        told(lambda loss=loss: ByHand(loss), NO_MEAN)
    for loss in (printing_sum, drawing_mean):
        silently_both(by_hand(lambda loss=loss: ByHand(loss)))


@feature
def functions_that_no_tape_records() -> None:
    """Their rows are taken as they are, and those that they relate are told of: a copy would have gradients."""

    class Stops(ByHand):
        def __init__(self, function: Callable[[Any], Any]) -> None:
            super().__init__(contrastive)
            self.function = function

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                p = self(x, training=True)
                with tape.stop_recording():
                    z = self.function(p)
                loss = self.own_loss(z, p)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    silently_both(by_hand(lambda: Stops(unit)))
    for function in (lambda p: of_rows(p)[0], lambda p: p - ops.max(p, axis=0)):
        told(lambda function=function: Stops(function), NO_MEAN)
