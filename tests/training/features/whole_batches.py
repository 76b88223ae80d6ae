"""Losses and metrics of which only their author knows how they depend on the rows of the batch."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import kdist
from tests.helpers import spmd
from tests.helpers.logs import logged
from tests.training.features.registry import feature
from tests.training.fidelity import (
    OwnStep,
    both,
    deterministic_weights,
    fed,
    fit_alone,
    fit_evaluate_predict,
    mlp,
    outcome,
    rows,
    sequence_model,
    sequences,
)


def of_sums(t: Any, p: Any) -> Any:
    return ops.sum((t - p) ** 2)


def root(t: Any, p: Any) -> Any:
    return ops.sqrt(ops.mean((t - p) ** 2))


def mean_of_large_errors(t: Any, p: Any) -> Any:
    """As the masked loss of TensorFlow's tutorials: what counts differs between the ranks."""
    error = (t - p) ** 2
    counts = ops.cast(ops.abs(t) > 0.5, error.dtype)
    return ops.sum(error * counts) / ops.sum(counts)


def contrastive(t: Any, p: Any) -> Any:
    return -ops.mean(ops.log_softmax(ops.matmul(p, ops.transpose(t)), axis=-1))


def of_rows(t: Any, p: Any) -> Any:
    return ops.mean((t - p) ** 2, axis=-1)


class ScalarSum(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.sum(ops.abs(y_true - y_pred))


class Forgetful(keras.losses.MeanSquaredError):
    """Its config does not have its factor."""

    def __init__(self, factor: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.factor * super().call(y_true, y_pred)


LOSSES: dict[str, Callable[[], Any]] = {
    "of_sums": lambda: of_sums,
    "root": lambda: root,
    "mean_of_large_errors": lambda: mean_of_large_errors,
    "contrastive": lambda: contrastive,
    "of_rows": lambda: of_rows,
    "scalar_sum": ScalarSum,
    "forgetful": lambda: Forgetful(100.0),
    "forgetful_weighted_mean": lambda: Forgetful(100.0, reduction="mean_with_sample_weight"),
    "dice": keras.losses.Dice,
    "tversky": keras.losses.Tversky,
    "along_the_rows": lambda: keras.losses.CosineSimilarity(axis=0),
}


def probabilities(shape: str = "ragged") -> tuple[np.ndarray, np.ndarray]:
    x, y = rows(shape)
    return x, 1 / (1 + np.exp(-y))


@feature
def losses_of_whole_batches() -> None:
    x, y = probabilities()
    for make in LOSSES.values():

        def script(batch: int, make: Callable[[], Any] = make) -> dict[str, Any]:
            model = mlp(activation="sigmoid")
            model.compile(keras.optimizers.SGD(0.01, momentum=0.5), make())
            return fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)

        both(script)


@feature
def the_contrastive_loss_of_the_example() -> None:
    """Over the pairs of all ranks' rows; without scikit-learn, which the rest of the example needs."""
    names = ("sklearn", "sklearn.datasets", "sklearn.linear_model", "sklearn.model_selection")
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in names}):
        loss = runpy.run_path(str(spmd.ROOT / "examples" / "contrastive.py"))["contrastive_loss"]
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Reshape((2, 4))])
        deterministic_weights(model)
        model.compile(keras.optimizers.Adam(0.002), loss)
        return fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)

    both(script)


@feature
def weighted_losses_of_whole_batches() -> None:
    x, y = probabilities()
    weight = np.linspace(0.1, 3.0, len(x))
    for name in ("of_rows", "forgetful", "forgetful_weighted_mean", "dice"):

        def script(batch: int, name: str = name) -> dict[str, Any]:
            model = mlp(activation="sigmoid")
            model.compile(keras.optimizers.Adam(0.01), LOSSES[name](), weighted_metrics=[of_rows])
            return fit_alone(model, fed("tf_data", (x, y, weight), batch))

        both(script)


@feature
def losses_of_split_batches() -> None:
    x, y = probabilities("one short")

    def script(batch: int) -> dict[str, Any]:
        model = mlp(activation="sigmoid")
        model.compile(keras.optimizers.SGD(0.01), mean_of_large_errors, metrics=[root])
        return fit_evaluate_predict(model, fed("arrays", (x, y), 6), x, y, 6)

    both(script, scale_batch=False)


@feature
def masked_losses_of_whole_batches() -> None:
    """The mask of the predictions reaches a loss of the user's, whose config is never asked."""
    x, y = sequences()
    rtol = 1e-9 if keras.__version__ >= "3.13" else 1e-6
    for make in (lambda: of_rows, lambda: Forgetful(100.0), lambda: Forgetful(3.0, reduction="sum")):

        def script(batch: int, make: Callable[[], Any] = make) -> dict[str, Any]:
            model = sequence_model()
            model.compile(keras.optimizers.SGD(0.01), make(), metrics=[of_rows])
            return fit_evaluate_predict(model, fed("arrays", (x, y), batch), x, y, batch)

        both(script, rtol=rtol)


@feature
def losses_of_padded_sequences() -> None:
    """The Transformer tutorial's loss and metric on padded batches, which are longer on one rank than on another."""
    x, _ = sequences()

    def masked_loss(t: Any, p: Any) -> Any:
        loss = keras.losses.sparse_categorical_crossentropy(t, p, from_logits=True)
        mask = ops.cast(t != 0, loss.dtype)
        return ops.sum(loss * mask) / ops.sum(mask)

    def masked_accuracy(t: Any, p: Any) -> Any:
        mask = t != 0
        return ops.sum(ops.cast((ops.cast(ops.argmax(p, axis=-1), t.dtype) == t) & mask, "float64")) / ops.sum(
            ops.cast(mask, "float64")
        )

    lengths = (x != 0).sum(axis=1)
    order = np.argsort(lengths, kind="stable")
    x, lengths = x[order], lengths[order]  # so that the ranks' batches have other lengths

    with logged() as said:
        _compare_padded_sequences(x, lengths, masked_loss, masked_accuracy)
    told = [each for each in said if "wider on one rank" in each]
    assert ["loss 'masked_loss'" in each for each in told] == ([True] if kdist.rank() == 0 else []), told


def _compare_padded_sequences(x: Any, lengths: Any, masked_loss: Any, masked_accuracy: Any) -> None:
    for eager in (False, True):

        def script(batch: int, eager: bool = eager) -> dict[str, Any]:
            ragged = tf.RaggedTensor.from_tensor(x, lengths=lengths)
            data = tf.data.Dataset.from_tensor_slices(ragged).map(lambda row: (row, (row * 3) % 9))
            model = keras.Sequential(
                [keras.Input((None,), dtype="int64"), keras.layers.Embedding(9, 4), keras.layers.Dense(9)]
            )
            deterministic_weights(model)
            model.compile(keras.optimizers.Adam(0.01), masked_loss, metrics=[masked_accuracy], run_eagerly=eager)
            return outcome(model, model.fit(data.padded_batch(batch), epochs=2, verbose=0))

        both(script)


@feature
def losses_of_several_outputs() -> None:
    x, y = probabilities()

    def script(batch: int) -> dict[str, Any]:
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(4, activation="tanh")(inputs)
        outputs = {
            "a": keras.layers.Dense(2, activation="sigmoid", name="a")(hidden),
            "b": keras.layers.Dense(2, name="b")(hidden),
        }
        model = keras.Model(inputs, outputs)
        deterministic_weights(model)
        model.compile(
            keras.optimizers.SGD(0.1),
            {"a": keras.losses.Dice(), "b": "mse"},
            loss_weights={"a": 0.3, "b": 2.0},
            metrics={"a": [root], "b": ["mae", Largest()]},
        )
        history = model.fit(x, {"a": y, "b": 2 * y}, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        return outcome(model, history)

    both(script)


@feature
def compiled_losses_on_chosen_rows() -> None:
    """A `train_step` calls the compiled loss on rows that it has chosen: more on one rank than on another."""
    x, y = rows("ragged")

    class Choosing(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            chosen = x[:, 0] > tf.cast(-0.5, x.dtype)
            x, y = tf.boolean_mask(x, chosen), tf.boolean_mask(y, chosen)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x, y, y_pred)
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"weight": tf.reduce_mean(weights[0])}

    for loss in ("mse", root):

        def script(batch: int, loss: Any = loss) -> dict[str, Any]:
            model = Choosing([keras.Input((5,)), keras.layers.Dense(2)])
            deterministic_weights(model)
            model.compile(keras.optimizers.SGD(0.1), loss)
            return fit_alone(model, fed("arrays", (x, y), batch))

        both(script)


@feature
def weights_that_are_no_floats() -> None:
    x, y = rows("ragged")
    for dtype in ("int32", "bool"):
        weight = (np.arange(len(x)) % 3).astype(dtype)

        def script(batch: int, weight: np.ndarray = weight) -> dict[str, Any]:
            model = mlp()
            model.compile(
                keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
            )
            return fit_alone(model, fed("arrays", (x, y, weight), batch))

        both(script)


class Largest(keras.metrics.Metric):
    """The largest error; a maximum and a count of batches."""

    def __init__(self, name: str = "largest", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.largest = self.add_weight(name="largest", initializer="zeros")
        self.batches = self.add_weight(name="batches", initializer="zeros")
        self.rows = self.add_weight(name="rows", initializer="zeros", dtype="int64")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.rows.assign_add(ops.cast(ops.shape(y_true)[0], "int64"))
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y_true - y_pred))))
        self.batches.assign(self.batches + 1)

    def result(self) -> Any:
        return {"largest": self.largest + 0, "by_batches": self.largest / self.batches, "rows": self.rows + 0}


class Composed(keras.metrics.Metric):
    """Metrics within a metric."""

    def __init__(self, name: str = "composed", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.mean = keras.metrics.Mean()
        self.worst = Largest()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.mean.update_state(root(y_true, y_pred))
        self.worst.update_state(y_true, y_pred)

    def result(self) -> Any:
        return self.mean.result() * self.worst.result()["largest"]

    def reset_state(self) -> None:
        self.mean.reset_state()
        self.worst.reset_state()


class OwnMean(keras.metrics.Mean):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return super().update_state(root(y_true, y_pred))


@feature
def metrics_of_whole_batches() -> None:
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        makers = (Largest, Composed, OwnMean, lambda: keras.metrics.CosineSimilarity(axis=0))
        model.compile(
            keras.optimizers.SGD(0.1),
            "mse",
            metrics=[mean_of_large_errors, keras.losses.MeanSquaredError(), "mae", *(make() for make in makers)],
        )
        validated = model.fit(
            **fed("arrays", (x, y), batch),
            epochs=2,
            validation_data=(x[:-3], y[:-3]),
            validation_batch_size=batch,
            verbose=0,
        )
        evaluated = model.evaluate(x, y, batch_size=batch, verbose=0, return_dict=True)
        return outcome(model, validated, evaluate=evaluated)

    both(script)


@feature
def metrics_of_whole_batches_in_own_steps() -> None:
    x, y = rows("few")

    class Measuring(OwnStep):
        def __init__(self) -> None:
            super().__init__()
            self.mae = OwnMean(name="mae")
            self.worst = Largest()

        def train_step(self, data: Any) -> dict[str, Any]:
            logs = super().train_step(data)
            self.worst.update_state(data[1], self(data[0]))
            return {**logs, **self.worst.result()}

        @property
        def metrics(self) -> list[Any]:
            return [self.loss_tracker, self.mae, self.worst]

    for eager in (False, True):

        def script(batch: int, eager: bool = eager) -> dict[str, Any]:
            model = Measuring()
            model.build((None, 5))
            deterministic_weights(model)
            model.compile(keras.optimizers.SGD(0.1), run_eagerly=eager)
            return fit_alone(model, fed("arrays", (x, y), batch))

        both(script)


class Remembers(keras.metrics.Metric):
    """Keeps all errors in a list of Python's, which kdist does not see, and takes their median."""

    def __init__(self, name: str = "median", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.errors: list[float] = []

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.errors += np.abs(np.asarray(y_true) - np.asarray(y_pred)).ravel().tolist()

    def result(self) -> Any:
        return tf.constant(np.median(self.errors))

    def reset_state(self) -> None:
        self.errors = []


@feature
def metrics_whose_state_is_a_list() -> None:
    """In eager steps: a step that is traced would keep symbolic tensors."""
    for shape in ("ragged", "one short", "few"):
        x, y = rows(shape)

        def script(batch: int, x: Any = x, y: Any = y) -> dict[str, Any]:
            model, metric = mlp(), Remembers()
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[metric], run_eagerly=True)
            model.fit(**fed("arrays", (x, y), batch), validation_data=(x[:3], y[:3]), verbose=0)
            evaluated = model.evaluate(x, y, batch_size=batch, verbose=0, return_dict=True)
            return {"evaluate": evaluated, "number": len(metric.errors), "weights": model.get_weights()}

        both(script)


@feature
def metrics_of_whole_batches_on_batches() -> None:
    x, y = rows("one short")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1), root, metrics=[Largest(), OwnMean(name="own")])
        trained = [model.train_on_batch(x, y) for _ in range(2)]
        return outcome(model, trained=trained, tested=model.test_on_batch(x, y, return_dict=True))

    both(script)


@feature
def targets_of_unknown_rank() -> None:
    """As `tf.numpy_function` gives them."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.05), ScalarSum())
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
        data = data.map(lambda a, b: (a, tf.numpy_function(lambda values: values, [b], tf.float64)))
        return fit_alone(model, {"x": data})

    both(script)
