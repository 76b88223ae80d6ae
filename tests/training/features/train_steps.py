"""A `train_step`, a `fit` or a loop of the user's own."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist
from tests.helpers.logs import logged
from tests.training.features.registry import feature, simple
from tests.training.fidelity import BATCH, OwnStep, both, deterministic_weights, mlp, outcome, rows, size


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
def weights_that_a_step_reads_late_are_those_before_its_update() -> None:
    """The gradient of a factor does not need the factor, which is read after the gradient could be computed."""

    def wait(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        time.sleep(0.2)
        return rows

    class Late(OwnStep):
        def __init__(self) -> None:
            super().__init__()
            self.factor = self.add_weight(name="factor", initializer=keras.initializers.Constant(0.3))

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            late = tf.numpy_function(wait, [x], x.dtype)
            with tf.GradientTape() as tape:
                error = keras.ops.mean((y - self(x, training=True)) ** 2)
                with tf.control_dependencies([late]):
                    factor = tf.convert_to_tensor(self.factor)
                loss = factor * error
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(gradients, self.trainable_weights)
            return {"loss": loss, "error": error}

    x, y = rows("even")

    def script(batch: int) -> dict[str, Any]:
        model = Late()
        model.build((None, 5))
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.01))
        return outcome(model, model.fit(x, y, batch_size=batch, shuffle=False, verbose=0))

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
def a_step_that_updates_what_the_model_does_not_know() -> None:
    """The first update builds the optimizer, for the variables that it is given."""

    class Own(OwnStep):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True)) * tf.exp(-self.noise) + self.noise
            variables = [*self.trainable_variables, self.noise]
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"my_loss": loss}

    x, y = rows("ragged")
    for run_eagerly in (False, True):

        def script(batch: int) -> dict[str, Any]:
            model = Own()
            model.noise = tf.Variable(0.0, dtype=keras.config.floatx())
            model.build((None, 5))
            deterministic_weights(model)
            model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=run_eagerly)  # noqa: B023
            history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
            return outcome(model, history, noise=model.noise.numpy())

        both(script)


@feature
def a_step_that_returns_the_loss_that_it_scales() -> None:
    class Own(OwnStep):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.optimizer.scale_loss(self.compute_loss(x, y, self(x, training=True)))
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"scaled": loss}

    x, y = rows("ragged")
    scaling = functools.partial(keras.optimizers.LossScaleOptimizer, initial_scale=4.0, dynamic_growth_steps=3)
    for wrap in (lambda optimizer: optimizer, scaling):

        def script(batch: int) -> dict[str, Any]:
            model = Own()
            model.build((None, 5))
            deterministic_weights(model)
            model.compile(wrap(keras.optimizers.SGD(0.1)), "mse")  # noqa: B023
            return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

        both(script)


@feature
def what_a_step_updates_is_what_the_end_of_its_data_counts() -> None:
    """Plain Keras' graph that finds the end of the data decays the step's weights, and those of no other optimizer."""

    class Unused(keras.Layer):
        def build(self, input_shape: Any) -> None:
            self.without_gradient = self.add_weight(shape=(3,), initializer="ones")

        def call(self, inputs: Any) -> Any:
            return inputs

    class Sometimes(OwnStep):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            grads = tape.gradient(loss, self.trainable_weights)
            tf.cond(loss > 0, lambda: self.optimizer.apply(grads, self.trainable_weights), lambda: None)
            return {"loss": loss}

    x, y = rows("even")

    def data(batch: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).filter(lambda *_: True)

    def with_a_teacher(batch: int) -> dict[str, Any]:
        teacher = mlp()
        teacher.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5), "mse")
        teacher.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        teacher.trainable = False
        model = keras.Sequential([keras.Input((5,)), teacher, Unused(), keras.layers.Dense(2)])
        deterministic_weights(model.layers[-1])
        model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5), "mse")
        history = model.fit(data(batch), epochs=2, verbose=0)
        return outcome(model, history, of_the_teacher=int(teacher.optimizer.iterations))

    def in_a_branch(batch: int) -> dict[str, Any]:
        model = Sometimes()
        model.build((None, 5))
        deterministic_weights(model)
        model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5), "mse")
        return outcome(model, model.fit(data(batch), epochs=2, verbose=0))

    both(with_a_teacher)
    both(in_a_branch)


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
        with logged() as said:
            history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, validation_data=(x, y), verbose=0)
        history.history.pop("square")  # no metric's result any more: the last step's, averaged over the ranks
        is_told = any("computed from the results of metrics: square" in text for text in said)
        assert is_told == (batch == BATCH and kdist.is_chief()), said
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


@feature
def gradients_that_some_ranks_alone_have_in_an_eager_step() -> None:
    """A branch in Python takes the experts that a rank's rows need; in `fit`, and in a loop without `strategy.run`."""

    class Experts(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.experts = [keras.layers.Dense(2, name=f"expert_{number}") for number in range(3)]
            for each in self.experts:
                each.build((None, 5))
            deterministic_weights(self)

        def call(self, x: Any) -> Any:
            outputs = tf.zeros([tf.shape(x)[0], 2], x.dtype)
            sizes = tf.abs(x[:, 0])
            for expert, low, high in zip(self.experts, (0.0, 0.5, 1.0), (0.5, 1.0, 9.0), strict=True):
                places = tf.where((sizes >= low) & (sizes < high))
                if len(places):
                    outputs = tf.tensor_scatter_nd_add(outputs, places, expert(tf.gather_nd(x, places)))
            return outputs

    x, y = rows("even")
    batches = 3 * size()

    def fitted(batch: int) -> dict[str, Any]:
        model = Experts()
        model.compile(keras.optimizers.Adam(0.05), "mse", run_eagerly=True)
        return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

    class WithOwnStep(Experts):
        def train_step(self, data: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(data[0], data[1], self(data[0]))
            pairs = zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
            # The first update builds the optimizer, here for the experts of the rank's rows.
            self.optimizer.apply_gradients([(gradient, weight) for gradient, weight in pairs if gradient is not None])
            return {"loss": loss}

    def own_step(batch: int) -> dict[str, Any]:
        model = WithOwnStep()
        model.compile(keras.optimizers.Adam(0.05), "mse", run_eagerly=True)
        return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

    def looped(batch: int) -> dict[str, Any]:
        model, optimizer = Experts(), keras.optimizers.Adam(0.05)
        optimizer.build(model.trainable_weights)
        mine = slice(kdist.rank(), None, size()) if batch == BATCH else slice(None)
        for start in range(0, batches, size()):
            with tf.GradientTape() as tape:
                rows_of_step = slice(start, start + size())
                loss = tf.reduce_mean((model(tf.constant(x[rows_of_step][mine])) - y[rows_of_step][mine]) ** 2)
            gradients = tape.gradient(loss, model.trainable_weights)
            pairs = zip(gradients, model.trainable_weights, strict=True)
            optimizer.apply_gradients([(gradient, weight) for gradient, weight in pairs if gradient is not None])
        return outcome(model)

    for script in (fitted, own_step, looped):
        both(script)


class Accumulates(keras.Model):
    """Adds up the gradients of two steps by hand, as many scripts do."""

    def __init__(self, of: Callable[[Any], Any] = lambda gradient: gradient) -> None:
        super().__init__()
        self.net, self.of = mlp(), of
        self.sums = [tf.Variable(tf.zeros(each.shape, each.dtype)) for each in self.net.trainable_variables]
        self.steps = tf.Variable(0, trainable=False)

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.steps.assign_add(1)
        for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables), strict=True):
            total.assign_add(0.5 * self.of(gradient))
        tf.cond(self.steps % 2 == 0, self.update, lambda: None)
        return {"last": loss}

    def update(self) -> None:
        self.optimizer.apply_gradients(zip(self.sums, self.trainable_variables, strict=True))
        for total in self.sums:
            total.assign(tf.zeros_like(total))


@feature
def gradients_that_a_step_accumulates_by_hand() -> None:
    x, y = rows("ragged")

    def script(batch: int, of: Callable[[Any], Any]) -> dict[str, Any]:
        model = Accumulates(of)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return outcome(model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0))

    for of in (lambda gradient: gradient, lambda gradient: tf.clip_by_norm(gradient, 0.1)):
        with logged(logging.WARNING) as said:
            both(functools.partial(script, of=of))
        assert not [text for text in said if "the step writes" in text], said
