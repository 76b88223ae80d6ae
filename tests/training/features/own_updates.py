"""Weights that a step of the user's own, or a layer, writes by its rows: by a rule of its own, or for a while."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import kdist
from kdist._engine import open_engine
from kdist.errors import NotSynchronizedError
from tests.training.features.own_losses import ByHand, by_hand, silently_both
from tests.training.features.pairs import compiled
from tests.training.features.registry import feature
from tests.training.fidelity import BATCH, deterministic_weights, fed, fit_alone, mlp, rows

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


class OfCompile(keras.Model):
    """Updates weights by gradients of the compiled loss, which it computes in a way of its own."""

    def __init__(self, net: Any, gradients: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.net, self.gradients = net, gradients

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        loss, gradients = self.gradients(self, *data)
        for weight, gradient in zip(self.trainable_variables, gradients, strict=True):
            weight.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return {"loss": loss}


def by_weights(model: Any, x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True))
    return loss, tape.gradient(loss, model.trainable_variables)


def by_weights_and_inputs(model: Any, x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = model.compute_loss(x, y, model(x, training=True))
    _, *gradients = tape.gradient(loss, [x, *model.trainable_variables])
    return loss, gradients


def by_the_chain_rule(model: Any, x: Any, y: Any) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        predicted = model(x, training=True)
        loss = model.compute_loss(x, y, predicted)
    by_predicted = tape.gradient(loss, predicted)
    return loss, tape.gradient(predicted, model.trainable_variables, output_gradients=by_predicted)


@feature
def updates_without_an_optimizer() -> None:
    for loss in LOSSES.values():
        for rule in RULES.values():
            silently_both(by_hand(lambda loss=loss, rule=rule: Ruled(loss, rule)))
    for gradients in (by_weights, by_weights_and_inputs, by_the_chain_rule):
        silently_both(compiled(lambda by=gradients: OfCompile(mlp(), by), loss="mse"))


@feature
def updates_of_embeddings_without_an_optimizer_are_refused() -> None:
    """What a rank has of their gradients is sparse: they are its own."""
    x, y = rows("ragged")
    with kdist.scope(scale_lr=None):
        layers = [keras.layers.Embedding(3, 2), keras.layers.Flatten(), keras.layers.Dense(2)]
        model = OfCompile(keras.Sequential(layers), by_weights)
        model.compile("sgd", "mse")
        with pytest.raises(NotSynchronizedError, match="embeddings"):
            model.fit((x > 0).astype("int64"), y, batch_size=BATCH, verbose=0)


@feature
def gradients_that_are_accumulated_in_weights() -> None:
    """After `scale_loss`, too, by which a rank's gradients are its terms of a sum."""

    class Accumulates(OfCompile):
        def __init__(self, *, trainable: bool) -> None:
            super().__init__(mlp(), by_weights)
            weights = self.net.trainable_variables
            self.sums = [keras.Variable(tf.zeros_like(each.value), trainable=trainable) for each in weights]

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                scaled = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, self.net.trainable_variables)
            for total, gradient in zip(self.sums, gradients, strict=True):
                total.assign_add(gradient)
            so_far = [tf.convert_to_tensor(each) for each in self.sums]
            self.optimizer.apply_gradients(zip(so_far, self.net.trainable_variables, strict=True))
            for total in self.sums:
                total.assign(0.5 * total)
            return {"loss": loss}

    for trainable in (True, False):
        silently_both(compiled(lambda own=trainable: Accumulates(trainable=own), loss="mse"))


@feature
def sharpness_aware_minimization() -> None:
    """As its authors write it, and with means over all ranks that the step computes."""

    def mean(gradients: Any) -> Any:
        return kdist.all_reduce(gradients, "mean")

    for loss in LOSSES.values():
        silently_both(by_hand(lambda loss=loss: SharpnessAware(loss, lambda gradients: gradients)))
    silently_both(by_hand(lambda: SharpnessAware(LOSSES["mean"], mean)))


@feature
def gradients_behind_several_weights_are_sent_once() -> None:
    """Each of the weights that SAM writes is computed from all gradients, by their norm."""
    x, y = rows("even")
    kind = type(open_engine(kdist.cluster_info()))
    with mock.patch.object(kind, "allreduce", autospec=True, side_effect=kind.allreduce) as sent:
        with kdist.scope(scale_lr=None):
            model = SharpnessAware(LOSSES["mean"], lambda gradients: gradients)
            model.compile(keras.optimizers.SGD(0.01))
            model.fit(x, y, batch_size=BATCH, verbose=0)
        largest = max((tuple(each.shape) for each in model.trainable_variables), key=np.prod)
        traced = [each for call in sent.call_args_list for each in call.args[1] if tf.is_symbolic_tensor(each)]
    by_trace = collections.Counter(id(each.graph) for each in traced if tuple(each.shape) == largest)
    assert by_trace, "nothing is sent as it is"
    assert max(by_trace.values()) <= 3, by_trace  # for what SAM steps by, for the log of the norm, and to the optimizer


@feature
def weights_that_a_layer_sets_by_the_first_batch() -> None:
    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential([keras.Input((5,)), OfFirstBatch(), keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return fit_alone(model, fed("arrays", rows("ragged"), batch))

    silently_both(script)
