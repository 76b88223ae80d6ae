"""A script that uses an engine and no scope: each rank brings its rows, and its step sums gradients by the engine."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import kdist
from kdist._engine import open_engine
from kdist.engines.engine import Engine


def engine() -> Engine:
    return open_engine(kdist.cluster_info())


class OwnLoop(keras.Model):
    """Keras' step by hand: loss, gradients, their mean over the ranks, update."""

    def __init__(self, layers: list[keras.layers.Layer]) -> None:
        super().__init__()
        self.stack = layers

    def build(self, input_shape: Any) -> None:
        for layer in self.stack:
            layer.build(input_shape)
            input_shape = layer.compute_output_shape(input_shape)

    def call(self, inputs: Any, training: bool = False) -> Any:
        for layer in self.stack:
            inputs = layer(inputs, training=training) if isinstance(layer, keras.layers.Dropout) else layer(inputs)
        return inputs

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted, training=True)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        size = engine().size
        gradients = engine().allreduce(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply([gradient / size for gradient in gradients], self.trainable_variables)
        return self.compute_metrics(x, y, predicted)


def own_loop(optimizer: Any = "sgd", *, seed: int = 0, dropout: float = 0.0) -> OwnLoop:
    """Makes a compiled model of 5 inputs and 2 outputs, its weights from `seed`."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(6, activation="tanh"), keras.layers.Dropout(dropout), keras.layers.Dense(2)]
    model = OwnLoop(layers)
    model.build((None, 5))
    model.compile(optimizer, "mse")
    return model
