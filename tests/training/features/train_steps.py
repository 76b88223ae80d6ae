"""A `train_step`, a `fit` or a loop of the user's own."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tests.training.features.registry import feature, simple
from tests.training.fidelity import OwnStep, both, deterministic_weights, outcome, rows


@feature
def a_fit_of_the_users_own() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2)
            self.build((None, 5))
            deterministic_weights(self)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def fit(self, x: Any, y: Any, **kwargs: Any) -> Any:
            return super().fit(x * 2.0, y, **kwargs)

    simple(lambda: {"metrics": ["mae"]}, model=Own)


@feature
def custom_train_step() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = OwnStep()
        model.build((None, 5))
        deterministic_weights(model)
        model.compile(keras.optimizers.Adam(0.01))
        return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

    both(script)


@feature
def custom_train_step_with_own_logs() -> None:
    class Own(OwnStep):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
            )
            return {"my_loss": loss}

    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = Own()
        model.build((None, 5))
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

    both(script)


@feature
def custom_train_step_that_returns_some_metrics() -> None:
    """Running values of a metric among other logs: an epoch's are those of the rows of all ranks."""

    class Own(OwnStep):
        @property
        def metrics(self) -> list[Any]:
            return [*super().metrics, self.tracker, self.unseen]

        def __init__(self) -> None:
            super().__init__()
            self.tracker = keras.metrics.RootMeanSquaredError(name="root", dtype=keras.config.floatx())
            self.unseen = keras.metrics.Mean(name="unseen")

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            self.tracker.update_state(y, self(x))
            return {**super().train_step(data), "renamed": self.tracker.result(), "square": self.tracker.result() ** 2}

        def test_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            self.tracker.update_state(y, self(x))
            return {"renamed": self.tracker.result()}

    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = Own()
        model.build((None, 5))
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, validation_data=(x, y), verbose=0)
        history.history.pop("square")  # no metric's result any more: the last step's, averaged over the ranks
        return outcome(model, history, evaluated=model.evaluate(x, y, batch_size=batch, return_dict=True, verbose=0))

    both(script)


@feature
def a_model_that_cannot_be_called() -> None:
    """As in Keras' guides: a model of its own `train_step`, whose loss is built by the step, and without a `call`."""

    class Autoencoder(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.coder = keras.Sequential([keras.Input((5,)), keras.layers.Dense(5)])
            deterministic_weights(self.coder)

        def train_step(self, x: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, x, self.coder(x))
            gradients = tape.gradient(loss, self.coder.trainable_variables)
            self.optimizer.apply(gradients, self.coder.trainable_variables)
            return {"my_loss": loss}

    x, _ = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = Autoencoder()
        model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError(reduction="sum"))
        history = model.fit(x, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        return {"weights": model.coder.get_weights(), "history": history.history}

    both(script)
