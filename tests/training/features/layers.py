"""Layers with statistics and other state of their own; frozen layers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import kdist
from kdist._engine import open_engine
from kdist.keras_hooks.trainer import Trainer
from tests.helpers.logs import logged
from tests.training.features.registry import feature, simple
from tests.training.fidelity import (
    BATCH,
    OwnStep,
    both,
    deterministic_weights,
    fed,
    fit_alone,
    fit_evaluate_predict,
    mlp,
    rows,
    size,
)


@feature
def synchronized_batch_normalization() -> None:
    def model() -> keras.Model:
        made = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(6),
                keras.layers.BatchNormalization(synchronized=True, momentum=0.7),
                keras.layers.Activation("tanh"),
                keras.layers.Dense(2),
            ]
        )
        deterministic_weights(made)
        return made

    # The variance is a difference of means: it loses digits.
    simple(lambda: {"metrics": ["mae"]}, model=model, rtol=1e-7, all_methods=True)
    if size() > 2:
        simple(lambda: {"metrics": ["mae"]}, model=model, shape="few", rtol=1e-7)


@feature
def activations_that_are_computed_again() -> None:
    def model() -> keras.Model:
        with keras.RematScope(mode="activations"):
            return mlp()

    simple(lambda: {"optimizer": keras.optimizers.Adam(0.01, clipnorm=0.1)}, model=model)


@feature
def batch_normalization_is_merged() -> None:
    """Unsynchronised batch norm departs from one process; its statistics are the same on all ranks all the same."""
    keras.config.set_floatx("float64")
    x, y = rows("ragged")
    with logged() as said, kdist.scope(scale_lr=None):
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.BatchNormalization(momentum=0.5, name="norm"), keras.layers.Dense(2)]
        )
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
    assert sum("BatchNormalization 'norm' normalizes by the rows of each rank" in text for text in said) == 1, said
    mean = model.layers[0].moving_mean.numpy()
    assert np.all(np.abs(mean) > 1e-6)
    everyone = open_engine(kdist.cluster_info()).gather_objects(mean.tolist())
    assert all(theirs == everyone[0] for theirs in everyone)


class Positions(keras.layers.Layer):
    """Adds a table's rows at the positions of a text, as Transformers do; or at ids that all texts have.

    Args:
        ids: callable of the tokens that returns the ids.
    """

    def __init__(self, ids: Callable[[Any], Any]) -> None:
        super().__init__()
        self.tokens, self.table = keras.layers.Embedding(9, 3), keras.layers.Embedding(8, 3)
        self.ids = ids

    def call(self, tokens: Any) -> Any:
        return self.tokens(tokens) + self.table(self.ids(tokens))


POSITIONS: dict[str, Callable[[Any], Any]] = {
    "known": lambda tokens: ops.arange(tokens.shape[-1]),
    "by its shape": lambda tokens: tf.range(tf.shape(tokens)[-1]),
    "one twice": lambda tokens: tf.constant([0, 1, 1, 2, 3, 0]),
}


def a_model_with_positions(ids: Callable[[Any], Any], optimizer: Any) -> keras.Model:
    """Returns a compiled model whose second table gets one slice a position in one process, whatever the rows."""
    layers = [Positions(ids), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,), dtype="int64"), *layers])
    deterministic_weights(model)
    model.compile(optimizer, "mse")
    return model


@feature
def positions_in_a_table() -> None:
    """Optimizers that square gradients take each slice of a row by itself."""
    x = np.random.default_rng(0).integers(0, 9, size=(2 * size() * BATCH + 3, 6))
    y = np.random.default_rng(1).normal(size=(len(x), 1))
    optimizers: dict[str, Callable[[], Any]] = {
        "known": lambda: keras.optimizers.Adam(0.01),
        "by its shape": lambda: keras.optimizers.AdamW(0.01, clipnorm=0.01),
        "one twice": lambda: keras.optimizers.Adagrad(0.1),
    }

    for name, make in optimizers.items():

        def script(batch: int, name: str = name, make: Any = make) -> dict[str, Any]:
            return fit_alone(a_model_with_positions(POSITIONS[name], make()), fed("arrays", (x, y), batch))

        both(script)


@feature
def frozen_layers_and_recompiling() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)
        model.layers[0].trainable = False
        model.compile(keras.optimizers.Adam(0.01), "mae", metrics=["mse"])
        return fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)

    both(script)


@feature
def a_constant_does_not_drift() -> None:
    """A non-trainable weight that no step writes stays what it is, bit for bit."""
    x, y = rows("ragged")
    third = np.full(5, 1 / 3)

    class Scale(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.factor = self.add_weight(
                shape=(5,), trainable=False, initializer=lambda s, dtype: tf.constant(third, dtype)
            )

        def call(self, inputs: Any) -> Any:
            return inputs * self.factor

    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential([keras.Input((5,)), Scale(), keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=batch, epochs=3, verbose=0)
        assert np.array_equal(model.layers[0].factor.numpy(), third)
        return {}

    both(script)


@feature
def a_counter_of_rows_counts_all_ranks() -> None:
    x, y = rows("ragged")

    class Counter(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.seen = self.add_weight(
                shape=(), dtype="int64", trainable=False, initializer="zeros", aggregation="sum"
            )

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.seen.assign_add(keras.ops.cast(keras.ops.shape(inputs)[0], "int64"))
            return inputs

    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential([keras.Input((5,)), Counter(), keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile("sgd", "mse")
        return fit_alone(model, fed("arrays", (x, y), batch))

    both(script)


@feature
def statistics_written_after_the_update() -> None:
    """A second forward pass after the only update: what it writes is the same on all ranks too."""

    class Teacher(OwnStep):
        def __init__(self) -> None:
            super().__init__()
            self.norm = keras.layers.BatchNormalization(momentum=0.5)

        def call(self, inputs: Any, training: bool = False) -> Any:
            return self.dense(self.norm(inputs, training=training))

        def train_step(self, data: Any) -> dict[str, Any]:
            logs = super().train_step(data)
            self(data[0] + 1.0, training=True)
            return logs

    x, y = rows("ragged")
    with kdist.scope(scale_lr=None):
        model = Teacher()
        model.compile(keras.optimizers.SGD(0.1))
        model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0)
    mean = model.norm.moving_mean.numpy().tolist()
    everyone = open_engine(kdist.cluster_info()).gather_objects(mean)
    assert all(theirs == everyone[0] for theirs in everyone)


class TrainedLayer(Trainer, keras.layers.Dense):  # type: ignore[misc]  # Keras has no types
    """A layer that is a trainer, and no `keras.Model`, as in Keras' own tests; its list contains itself."""

    def __init__(self) -> None:
        keras.layers.Dense.__init__(self, 2, kernel_initializer="ones")
        Trainer.__init__(self)
        self.found: list[Any] = []
        self.found.append(self.found)


@feature
def a_layer_that_is_a_trainer() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = TrainedLayer()
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        data = {"x": x, "y": y, "batch_size": batch}
        return fit_evaluate_predict(model, data, x, y, batch, shuffle=False)

    both(script)


RELATING: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: x - ops.mean(x, axis=0),
    "largest": lambda x: x / ops.max(ops.abs(x)),
    "differences": lambda x: ops.sum(ops.exp(-ops.abs(x[:, None] - x[None])), axis=1),
    "products": lambda x: ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x),
    "turned": lambda x: 0.7 * x + 0.3 * x[::-1],
}
ROW_BY_ROW: dict[str, Callable[[Any], Any]] = {
    "length": lambda x: ops.norm(x, axis=-1, keepdims=True) * x,
    "largest of none": lambda x: x + 0 * ops.max(x),
    "mean of all ranks": lambda x: x - kdist.all_reduce(ops.mean(x, axis=0), "mean"),
}
OF_KERAS: dict[str, Callable[[], Any]] = {
    "normalized": lambda: [keras.layers.BatchNormalization(synchronized=True)],
    "recurrent": lambda: [keras.layers.Reshape((3, 2)), keras.layers.LSTM(6)],
}


@feature
def layers_that_relate_rows_are_named() -> None:
    """Each rank relates its own rows: a layer's output is needed where it is, not where a loss is."""
    of_functions = {name: lambda made=made: [keras.layers.Lambda(made)] for name, made in RELATING.items()}
    row_by_row = {name: lambda made=made: [keras.layers.Lambda(made)] for name, made in ROW_BY_ROW.items()}
    some = {name: of_functions[name] for name in ("mean", "differences")}
    for shape, named in (("ragged", of_functions), ("even", some)):
        x, y = rows(shape)
        for makers, is_told in ((named, True), (row_by_row | OF_KERAS if shape == "ragged" else {}, False)):
            for name, make in makers.items():
                with logged(logging.WARNING) as said, kdist.scope(scale_lr=None):
                    steps = [keras.layers.Dense(6), keras.layers.Dropout(0.1), *make(), keras.layers.Dense(2)]
                    model = keras.Sequential([keras.Input((5,)), *steps])
                    model.compile(keras.optimizers.SGD(0.01), "mse")
                    model.fit(x, y, batch_size=BATCH, verbose=0)
                found = [text for text in said if "outputs of the model relate rows" in text]
                assert len(found) == (is_told and kdist.rank() == 0), (shape, name, said)
                assert all("lambda" in text for text in found), found
