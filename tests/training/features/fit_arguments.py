"""What `fit` is given beside its data."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.training.features.registry import feature, simple
from tests.training.fidelity import BATCH, Batches, both, endless, fed, fit_alone, mlp, outcome, rows, size


@feature
def validation_split() -> None:
    simple(dict, validation_split=0.3)


@feature
def validation_data_arrays() -> None:
    simple(dict, validation_data=rows("ragged", seed=9), validation_freq=2)


@feature
def validation_in_larger_batches() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        # A mean of the batches' maxima: another size of batches gives another one.
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[lambda y, p: tf.reduce_max(tf.abs(y - p), axis=-1)])
        validation = {"validation_data": rows("even", seed=9), "validation_batch_size": 3 * batch}
        return fit_alone(model, fed("arrays", (x, y), batch), **validation)

    both(script)


@feature
def validation_data_generator() -> None:
    x, y = rows("ragged")
    # One global batch again and again: Keras begins anew at each epoch, and loses what its thread has drawn ahead.
    held_out = tuple(a[: size() * BATCH] for a in rows("even", seed=9))

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        validation = {"validation_data": endless(held_out, batch), "validation_steps": 3 * size() * BATCH // batch}
        return fit_alone(model, fed("arrays", (x, y), batch), **validation)

    both(script)


@feature
def validation_data_dataset_and_steps() -> None:
    x, y = rows("ragged")
    vx, vy = rows("even", seed=9)

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        validation = tf.data.Dataset.from_tensor_slices((vx, vy)).batch(batch)
        steps = 2 * size() * BATCH // batch
        return fit_alone(model, fed("arrays", (x, y), batch), validation_data=validation, validation_steps=steps)

    both(script)


@feature
def validation_py_dataset_and_batch_size() -> None:
    x, y = rows("ragged")
    vx, vy = rows("ragged", seed=9)

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        return fit_alone(model, fed("py_dataset_workers", (x, y), batch), validation_data=Batches((vx, vy), batch))

    both(script)


@feature
def class_weight() -> None:
    x, _ = rows("ragged")
    y = (x[:, 0] > 0).astype("int64")

    def script(batch: int) -> dict[str, Any]:
        model = mlp(activation="softmax")
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
        return fit_alone(model, fed("arrays", (x, y), batch), class_weight={0: 0.3, 1: 2.0})

    both(script)


@feature
def sample_weight() -> None:
    for kind in ("arrays", "tf_data", "py_dataset"):
        x, y = rows("ragged")
        weight = np.linspace(0.0, 2.0, len(x))

        def script(batch: int, kind: str = kind, x: Any = x, y: Any = y, weight: Any = weight) -> dict[str, Any]:
            model = mlp()
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], weighted_metrics=["mse"])
            return fit_alone(model, fed(kind, (x, y, weight), batch))

        both(script)


@feature
def steps_per_epoch_continues() -> None:
    """An epoch of fewer steps than the data has: the next one goes on where it stopped, and the last is ragged."""
    x, y = rows("even")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).repeat()
        steps = 2 * size() * BATCH // batch
        history = model.fit(dataset, steps_per_epoch=steps, epochs=3, verbose=0)
        return outcome(model, history)

    both(script)


@feature
def initial_epoch() -> None:
    simple(dict, initial_epoch=1)


@feature
def steps_per_execution() -> None:
    simple(lambda: {"steps_per_execution": 2, "metrics": ["mae"]}, all_methods=True)


@feature
def steps_per_execution_that_an_epoch_of_the_ranks_does_not_fill() -> None:
    """An epoch has as many batches as in one process, and so have an evaluation and a prediction."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        is_plain = batch != BATCH
        model = mlp()
        model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=1 if is_plain else 2 * size())
        data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(batch)
        steps = 3 if is_plain else 3 * size() - 1  # which Keras rounds up
        history = model.fit(data, steps_per_epoch=2 * steps, epochs=2, verbose=0)
        steps = 3 * (1 if is_plain else size())
        return outcome(
            model,
            history,
            evaluated=model.evaluate(data, steps=2 * steps, verbose=0),
            predicted=model.predict(data.map(lambda x, y: x), steps=2 * steps, verbose=0),
        )

    both(script)


if hasattr(keras.config, "set_max_steps_per_epoch"):

    @feature
    def steps_that_keras_limits() -> None:
        """Its limit of steps is one of the user's batches."""
        x, y = rows("ragged")

        def script(batch: int) -> dict[str, Any]:
            keras.config.set_max_steps_per_epoch(2 if batch != BATCH else 2 * size())
            try:
                model = mlp()
                model.compile(keras.optimizers.SGD(0.05), "mse")
                return fit_alone(model, fed("arrays", (x, y), batch))
            finally:
                keras.config.set_max_steps_per_epoch(None)

        both(script)


@feature
def run_eagerly() -> None:
    simple(lambda: {"run_eagerly": True, "metrics": ["mae"]}, all_methods=True)


class CallsNumPy(keras.Model):
    """What only runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2, kernel_initializer="ones")
        self.norm = keras.layers.BatchNormalization(synchronized=True)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.dense(self.norm(inputs + np.tanh(np.asarray(inputs)), training=training))


@feature
def numpy_in_eager_steps() -> None:
    """In a layer, a loss and a metric, of a model that the first batch builds and of one that is built."""

    def loss(y: Any, predicted: Any) -> Any:
        return tf.reduce_mean((np.clip(np.asarray(y), -1, 1) - predicted) ** 2, axis=-1)

    def error(y: Any, predicted: Any) -> Any:
        return np.abs(np.asarray(y) - predicted.numpy()).mean(axis=-1)

    def script(batch: int, kind: str, built: bool) -> dict[str, Any]:
        model = CallsNumPy()
        if built:
            model(np.ones((1, 5)))
        model.compile(keras.optimizers.SGD(0.05), loss, metrics=[error], run_eagerly=True)
        x, y = rows("ragged")
        found = outcome(model, model.fit(**fed(kind, (x, y), batch), epochs=2, verbose=0))
        tested = model.evaluate(x, y, batch_size=batch, verbose=0)
        first = CallsNumPy()
        first.compile(keras.optimizers.SGD(0.05), loss, run_eagerly=True)
        first.train_on_batch(x, y)
        return {**found, "tested": tested, "on batch": first.get_weights()}

    for kind, built in (("arrays", False), ("generator", False), ("tf_data", True)):
        both(functools.partial(script, kind=kind, built=built))


@feature
def automatic_names_are_those_of_plain_keras() -> None:
    """Each kind of model, built or not: Keras numbers the symbolic tensors that a script makes later alike."""
    x, y = rows("ragged")

    class Two(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)])
            self.outer = keras.layers.Dense(2)

        def call(self, inputs: Any) -> Any:
            return {"inner": self.inner(inputs), "outer": self.outer(inputs)}

    def script(batch: int) -> dict[str, Any]:
        names = []
        for make in (mlp, lambda: keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(2)]), Two):
            for eager in (False, True):
                model = make()
                targets = {"inner": y, "outer": y} if isinstance(model, Two) else y
                metrics = {"inner": ["mae"]} if isinstance(model, Two) else ["mae"]
                model.compile("sgd", "mse", metrics=metrics, run_eagerly=eager)
                names.append(keras.Input((1,)).name)
                model.fit(x, targets, batch_size=batch, verbose=0, validation_data=(x, targets))
                names.append(keras.Input((1,)).name)
                model.predict(x, batch_size=batch, verbose=0)
                model.train_on_batch(x, targets)
                names += [keras.Input((1,)).name, *(v.path for v in [*model.variables, *model.optimizer.variables])]
        return {"names": " ".join(names)}

    both(script)
