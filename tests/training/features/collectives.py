"""`kdist.all_gather` and `kdist.all_reduce` in models, losses and training steps; the steps of the guide's page."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import kdist
from tests.training.features.registry import feature
from tests.training.fidelity import both, deterministic_weights, fed, fit_alone, fit_evaluate_predict, rows


@feature
def losses_of_gathered_outputs() -> None:
    x, y = rows("ragged")

    class Contrastive(keras.Sequential):
        """All ranks compute the same."""

        def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
            y, y_pred = kdist.all_gather((y, y_pred))
            return -ops.mean(ops.log_softmax(ops.matmul(y_pred, ops.transpose(y)), axis=-1))

    class LocalAnchors(keras.Sequential):
        """Each rank compares its own rows with all rows: the others' rows get gradients, too."""

        def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
            return ops.mean(ops.logsumexp(ops.matmul(y_pred, ops.transpose(kdist.all_gather(y_pred))), axis=-1))

    for model_class in (Contrastive, LocalAnchors):

        def script(batch: int, model_class: Any = model_class) -> dict[str, Any]:
            model = model_class([keras.Input((5,)), keras.layers.Dense(2)])
            deterministic_weights(model)
            model.compile(keras.optimizers.SGD(0.1))
            return fit_alone(model, fed("arrays", (x, y), batch))

        both(script)


@feature
def losses_divided_by_the_weights_of_all_ranks() -> None:
    """As the guide shows it."""
    x, y = rows("ragged")
    weight = np.linspace(0.1, 3.0, len(x))

    class Weighted(keras.Sequential):
        def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
            errors = ops.mean((y - y_pred) ** 2, axis=-1)
            total = kdist.all_reduce(ops.sum(errors * sample_weight))
            return total / kdist.all_reduce(ops.sum(sample_weight))

    def script(batch: int) -> dict[str, Any]:
        model = Weighted([keras.Input((5,)), keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1))
        return fit_alone(model, fed("arrays", (x, y, weight), batch))

    both(script)


@feature
def layers_of_batch_statistics() -> None:
    x, y = rows("ragged")

    class Standardized(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            mean = kdist.all_reduce(ops.mean(x, axis=0), "mean")
            total, largest = kdist.all_reduce(ops.sum(x**2)), kdist.all_reduce(ops.max(x, axis=0), "max")
            mean += tf.math.imag(kdist.all_reduce(tf.complex(mean, ops.mean(x**3, axis=0)), "mean"))
            return (x - mean) / (1 + ops.sqrt(total)) + largest - kdist.all_reduce({"x": ops.min(x)}, "min")["x"]

    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(4), Standardized(), keras.layers.Dense(2, activation="tanh")]
        )
        deterministic_weights(model)
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return fit_evaluate_predict(model, fed("tf_data", (x, y), batch), x, y, batch)

    both(script)


@feature
def second_derivatives() -> None:
    """A loss of the gradient with respect to the rows, through what the ranks have summed or gathered."""
    x, _ = rows("even")
    y = x**2

    class Global(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            spread = kdist.all_reduce(ops.mean(x**2, axis=0), "mean")
            return x * ops.sqrt(spread) + ops.mean(ops.tanh(kdist.all_gather(x)), axis=0)

    class Slopes(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    energy = tf.reduce_sum(self(x, training=True))
                loss = tf.reduce_mean((inner.gradient(energy, x) - y) ** 2)
            self.optimizer.apply(outer.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    def script(batch: int) -> dict[str, Any]:
        layers = [keras.layers.Dense(4, "tanh"), Global(), keras.layers.BatchNormalization(synchronized=True)]
        model = Slopes([keras.Input((5,)), *layers, keras.layers.Dense(1, "tanh")])
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.01))
        return fit_alone(model, fed("arrays", (x, y), batch))

    both(script)


class Step(keras.Sequential):
    """A training step in parts, as the guide shows them."""

    def gradients(self, x: Any, y: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        return loss, tape.gradient(loss, self.trainable_variables)


class SharpnessAware(Step):
    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.trainable_variables
        _, gradients = self.gradients(x, y)
        gradients = kdist.all_reduce(gradients, "mean")
        norm = tf.linalg.global_norm(gradients)
        steps = [0.05 * gradient / norm for gradient in gradients]
        for weight, step in zip(weights, steps, strict=True):
            weight.assign_add(step)
        loss, gradients = self.gradients(x, y)
        for weight, step in zip(weights, steps, strict=True):
            weight.assign_sub(step)
        self.optimizer.apply(gradients, weights)
        return {"loss": loss, "gradient_norm": norm}


class Adversarial(Step):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.compute_loss(x, y, self(x, training=True))
        x = x + 0.1 * tf.sign(tape.gradient(loss, x))
        loss, gradients = self.gradients(x, y)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Skipping(Step):
    def train_step(self, data: Any) -> Any:
        loss, gradients = self.gradients(*data)
        loss = kdist.all_reduce(loss, "mean")
        counts = tf.cast(loss < 4.0, loss.dtype)
        self.optimizer.apply([gradient * counts for gradient in gradients], self.trainable_variables)
        return {"loss": loss, "counts": counts}


class MixUp(Step):
    def train_step(self, data: Any) -> Any:
        x, y = data
        all_x, all_y = kdist.all_gather((x, y))
        first = tf.reduce_sum(kdist.all_gather(tf.shape(x)[:1])[: kdist.rank()])
        others = (tf.shape(all_x)[0] - 1 - first - tf.range(tf.shape(x)[0])) % tf.shape(all_x)[0]
        x, y = 0.7 * x + 0.3 * tf.gather(all_x, others), 0.7 * y + 0.3 * tf.gather(all_y, others)
        loss, gradients = self.gradients(x, y)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@feature
def training_steps_of_the_guide() -> None:
    x, y = rows("ragged")
    of_rows: Any = "mse"
    of_batches = lambda t, p: ops.sqrt(ops.mean((t - p) ** 2))  # noqa: E731
    for model_class, loss in (
        (SharpnessAware, of_rows),
        (SharpnessAware, of_batches),
        (Adversarial, of_batches),
        (Skipping, of_rows),
        (MixUp, of_batches),
    ):

        def script(batch: int, model_class: Any = model_class, loss: Any = loss) -> dict[str, Any]:
            model = model_class([keras.Input((5,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])
            deterministic_weights(model)
            model.compile(keras.optimizers.SGD(0.1), loss)
            return fit_alone(model, fed("arrays", (x, y), batch))

        both(script)


@feature
def collectives_outside_of_a_step() -> None:
    value = tf.constant([1.0, 2.0]) * (kdist.rank() + 1)
    assert kdist.all_gather(value) is value, "outside of the scope"
    assert kdist.all_reduce(value) is value, "outside of the scope"
    sums = []

    class Sums(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            sums.append(kdist.all_reduce(value).numpy().tolist())

    with kdist.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0, callbacks=[Sums()])  # still of all ranks
    total = kdist.size() * (kdist.size() + 1) / 2
    assert sums == [[total, 2 * total]]
    with kdist.scope():
        ranks = tf.range(kdist.size(), dtype=tf.float32) + 1
        gathered = kdist.all_gather(value)
        tf.debugging.assert_equal(gathered, tf.reshape(ranks[:, tf.newaxis] * [1.0, 2.0], [-1]))
        for op, combine in (("sum", tf.reduce_sum), ("mean", tf.reduce_mean), ("max", tf.reduce_max)):
            tf.debugging.assert_near(kdist.all_reduce(value, op), combine(ranks) * [1.0, 2.0])
        assert kdist.all_reduce([None, value], "mean")[0] is None  # as a gradient that there is not
        assert kdist.all_gather({"x": value, "y": None})["y"] is None
        with pytest.raises(ValueError, match="product"):
            kdist.all_reduce(value, "product")
