"""Methods of a model that the user has written or decorated, and arguments that are NumPy's."""

from __future__ import annotations

import functools
import tempfile
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist
from tests.training.features.registry import feature
from tests.training.fidelity import both, deterministic_weights, fed, fit_evaluate_predict, mlp, outcome, rows


class StepsInFunctions(keras.Sequential):
    @tf.function
    def train_step(self, data: Any) -> Any:
        x, y = data
        if tf.reduce_sum(x) > 1e9:  # AutoGraph makes a graph's branch of it
            x = tf.zeros_like(x)
        return super().train_step((x, y))

    @tf.function
    def test_step(self, data: Any) -> Any:
        return super().test_step(data)

    @tf.function
    def predict_step(self, data: Any) -> Any:
        return super().predict_step(data)


@feature
def steps_in_functions() -> None:
    """A decorator that users put on what Keras compiles anyway."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = StepsInFunctions([keras.Input((5,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        found = fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)
        for name, function in (("partial", functools.partial), ("method", types.MethodType)):
            other = mlp()
            other.train_step = tf.function(function(keras.Model.train_step, other))
            other.compile(keras.optimizers.Adam(0.01), "mse")
            for factor in (0.5, 2.0):  # of a stage of the update, in one process, too
                around = [kdist.callbacks.LearningRateSchedule(lambda epoch: factor)]  # noqa: B023
                history = other.fit(x, y, batch_size=batch, shuffle=False, verbose=0, callbacks=around)
            found[name] = outcome(other, history)
        return found

    both(script)


class Named(keras.Model):
    """Predicts a dict, of which its own method returns one item."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.build((None, 5))
        deterministic_weights(self)

    def call(self, inputs: Any) -> Any:
        return {"logits": self.dense(inputs), "inputs": inputs}

    def predict(self, x: Any, **kwargs: Any) -> Any:
        return super().predict(x, **kwargs)["logits"]


class Words(keras.Sequential):
    """Says in words what it predicts."""

    def predict(self, x: Any, **kwargs: Any) -> Any:
        return ["yes" if each > 0 else "no" for each in super().predict(x, **kwargs)[:, 0]]


@feature
def predictions_of_the_users_own() -> None:
    x, _ = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        words = Words([keras.Input((5,)), keras.layers.Dense(2)])
        deterministic_weights(words)
        said = words.predict(x, batch_size=batch, verbose=0)
        return {"named": Named().predict(x, batch_size=batch, verbose=0), "yes": [each == "yes" for each in said]}

    both(script)


class OwnPaths(keras.Sequential):
    """Its own methods have other arguments than those of Keras."""

    def save(self, *args: Any, **kwargs: Any) -> Any:
        return super().save(*args, **kwargs)

    def save_weights(self, where: Any) -> Any:
        return super().save_weights(where)


@feature
def files_of_the_users_own_methods() -> None:
    """Each rank writes by itself: no method of Keras' has the arguments."""
    with tempfile.TemporaryDirectory() as folder, kdist.scope():
        model = OwnPaths([keras.Input((5,)), keras.layers.Dense(2)])
        model.save(f"{folder}/model.keras")
        model.save_weights(f"{folder}/model.weights.h5")
        saved = keras.saving.load_model(f"{folder}/model.keras", {"OwnPaths": OwnPaths}).weights
        np.testing.assert_array_equal(saved[0].numpy(), model.weights[0].numpy())
        assert Path(folder, "model.weights.h5").exists()


@feature
def numbers_of_numpy() -> None:
    """A count that NumPy or pandas has made, as `(frame.split == "train").sum()`."""
    x, y = rows("even")

    def script(batch: int) -> dict[str, Any]:
        found = {}
        for kind in ("arrays", "tf_data"):
            model, data, number = mlp(), fed(kind, (x, y), batch), np.int64(len(x) // batch)
            model.compile(keras.optimizers.SGD(0.1), "mse")
            if kind == "arrays":
                data["batch_size"] = np.int64(batch)
            history = model.fit(**data, steps_per_epoch=number, epochs=np.int64(1), verbose=0)
            labels = y if kind == "arrays" else None
            evaluated = model.evaluate(data["x"], labels, batch_size=data.get("batch_size"), steps=number, verbose=0)
            found[kind] = outcome(model, history, evaluate=evaluated)
        return found

    both(script)
