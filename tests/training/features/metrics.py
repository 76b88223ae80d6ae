"""Metrics and logs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import kdist
from tests.helpers.logs import logged
from tests.training.features.registry import feature
from tests.training.fidelity import (
    BATCH,
    both,
    deterministic_weights,
    fed,
    fit_alone,
    fit_evaluate_predict,
    mlp,
    outcome,
    rows,
    size,
)


@feature
def sums_of_what_a_step_counts() -> None:
    """A number that a step hands to `Sum` counts rows or hits, or is one for each step; `Mean` gets means."""
    given: dict[str, Callable[[Any, Any], Any]] = {
        "rows": lambda x, error: tf.shape(x)[0],
        "hits": lambda x, error: tf.reduce_sum(tf.cast(error < 1.0, tf.float64)),
        "mean": lambda x, error: tf.reduce_mean(error),
        "largest": lambda x, error: tf.reduce_max(error),
        "root": lambda x, error: tf.sqrt(tf.reduce_sum(error)),
        "steps": lambda x, error: 1,
    }
    for shape in ("even", "ragged"):
        x, y = rows(shape)

        class Counting(keras.Sequential):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                self.sums = [keras.metrics.Sum(name) for name in given]
                self.error = keras.metrics.Mean("error")

            def test_step(self, data: Any) -> Any:
                x, y = data
                error = tf.abs(self(x)[:, 0] - y[:, 0])
                for metric in self.sums:
                    metric.update_state(given[metric.name](x, error))
                self.error.update_state(tf.reduce_mean(error))
                return {metric.name: metric.result() for metric in (*self.sums, self.error)}

        def script(batch: int, data: Any = (x, y), model_class: Any = Counting) -> dict[str, Any]:
            model = model_class([keras.Input((5,)), keras.layers.Dense(2)])
            deterministic_weights(model)
            model.compile(loss="mse")
            return {"evaluate": model.evaluate(*data, batch_size=batch, verbose=0, return_dict=True)}

        both(script)


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: keras.ops.mean(x, axis=0),
    "sum": lambda x: keras.ops.sum(x, axis=0),
    "largest": lambda x: keras.ops.max(x, axis=0),
    "deviation": lambda x: keras.ops.std(x, axis=0),
    "pairs": lambda x: keras.ops.matmul(keras.ops.transpose(x), x),
    "first": lambda x: x[0],
    "ratio": lambda x: keras.ops.sum(x * x, axis=0) / (1 + keras.ops.sum(keras.ops.abs(x), axis=0)),
    "counts": lambda x: keras.ops.sum(keras.ops.cast(x > 0, "int32"), axis=0),
}


class Given(keras.layers.Layer):
    """Gives metrics what is not one value for each row: vectors over the rows, and numbers with a weight."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.means = [keras.metrics.Mean(name=f"mean_of_{name}") for name in NUMBERS]
        self.sums = {name: keras.metrics.Sum(name=f"sum_of_{name}") for name in ("mean", "sum", "counts")}
        self.weighted = {name: keras.metrics.Mean(name=f"by_{name}") for name in ("hits", "size", "rows", "constant")}

    def call(self, x: Any) -> Any:
        for metric, number in zip(self.means, NUMBERS.values(), strict=True):
            metric.update_state(number(x))
        for name, metric in self.sums.items():
            metric.update_state(NUMBERS[name](x))
        hits, size = keras.ops.cast(x[:, 0] > 0, x.dtype), keras.ops.abs(x)
        of_hits = keras.ops.sum(hits * x[:, 1]) / keras.ops.maximum(keras.ops.sum(hits), 1)
        self.weighted["hits"].update_state(of_hits, sample_weight=keras.ops.sum(hits))
        self.weighted["size"].update_state(keras.ops.mean(x), sample_weight=keras.ops.sum(size))
        self.weighted["rows"].update_state(keras.ops.mean(x), sample_weight=keras.ops.shape(x)[0])
        self.weighted["constant"].update_state(keras.ops.mean(x), sample_weight=2.0)
        return x


@feature
def numbers_that_layers_and_steps_count_and_log() -> None:
    """Each of them where ranks have other numbers of rows."""

    class Logging(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            return {**super().train_step(data), **{name: number(data[0]) for name, number in NUMBERS.items()}}

        def test_step(self, data: Any) -> dict[str, Any]:
            return {**super().test_step(data), **{name: number(data[0]) for name, number in NUMBERS.items()}}

    x, y = rows("ragged")
    batch = 3 * size() - 1

    def script(_: int, kind: type[keras.Model]) -> dict[str, Any]:
        given = keras.Input((5,))
        hidden = Given()(given) if kind is keras.Model else given
        model = kind(given, keras.layers.Dense(2)(hidden))
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.01), "mse")
        logs: list[Any] = [
            model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, validation_data=(x, y), verbose=0).history
        ]
        logs += [model.test_on_batch(x[:count], y[:count], return_dict=True) for count in (batch, batch + 3)]
        return {"logs": logs, "weights": model.get_weights()}

    for kind in (keras.Model, Logging):
        with logged() as said:
            both(functools.partial(script, kind=kind), scale_batch=False)
        assert not [each for each in said if "he metric " in each or "he log " in each], said


@feature
def a_weighted_number_in_batches_of_other_lengths() -> None:
    """The graph of a batch knows the number of its rows at first, on each rank for itself."""

    class Weighted(keras.layers.Layer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.mean = keras.metrics.Mean(name="weighted")

        def call(self, x: Any) -> Any:
            self.mean.update_state(keras.ops.max(x), sample_weight=keras.ops.sum(keras.ops.abs(x)))
            return x

    x, y = rows("ragged")
    most = 3 * size() - 1

    def script(_: int) -> dict[str, Any]:
        model = keras.Sequential([keras.Input((5,)), Weighted(), keras.layers.Dense(2)])
        deterministic_weights(model.layers[-1])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        counts = (most, most - 1, most + 2, most)
        logs = [model.train_on_batch(x[:count], y[:count], return_dict=True) for count in counts]
        logs += [model.test_on_batch(x[:count], y[:count], return_dict=True) for count in counts]
        return {"logs": logs, "weights": model.get_weights()}

    both(script, scale_batch=False)


@feature
def exact_metrics() -> None:
    x, _ = rows("ragged")
    y = (x[:, :1] + 0.3 * x[:, 1:2] > 0).astype("int64")

    def batch_mean(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(keras.ops.cast(y_true, y_pred.dtype) - y_pred))

    def script(batch: int) -> dict[str, Any]:
        model = mlp(1, activation="sigmoid")
        model.compile(
            keras.optimizers.SGD(0.1),
            "binary_crossentropy",
            metrics=[
                "accuracy",
                keras.metrics.AUC(),
                keras.metrics.Precision(),
                keras.metrics.F1Score(threshold=0.5),
                batch_mean,
            ],
        )
        return fit_evaluate_predict(
            model, fed("arrays", (x, y), batch), x, y, batch, validation_data=rows("ragged", 4)[0:1] + (y[::-1],)
        )

    both(script)


@feature
def integers_before_all_other_metrics() -> None:
    """The first state that the ranks sum is of integers, as of `MeanIoU`; the model has no mean of the loss."""
    x, y = rows("ragged")
    labels = (y[:, :1] > 0).astype("int64")

    class Segmented(keras.Sequential):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.iou = keras.metrics.MeanIoU(2, sparse_y_pred=False)

        @property
        def metrics(self) -> list[Any]:
            return [self.iou]

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
            self.iou.update_state(y, y_pred)
            return {"iou": self.iou.result()}

    def script(batch: int) -> dict[str, Any]:
        model = Segmented([keras.Input((5,)), keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return fit_evaluate_predict(model, fed("arrays", (x, labels), batch), x, labels, batch)

    both(script)


@feature
def predicting_within_an_epoch() -> None:
    """What a callback predicts in the middle of an epoch leaves the epoch's metrics alone."""
    x, y = rows("ragged")

    class Predicts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.predict(x[:3], verbose=0)

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return outcome(
            model, model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, callbacks=[Predicts()])
        )

    both(script)


@feature
def metrics_that_are_reset_or_counted_in_the_midst_of_an_epoch() -> None:
    """By an evaluation and a reset, and by a step on a batch, which all ranks count."""
    x, y = rows("ragged")

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                self.model.evaluate(x[:7], y[:7], verbose=0)
                self.model.reset_metrics()
            elif batch == 1:
                self.model.test_on_batch(x[:5], y[:5])

    def script(batch: int) -> dict[str, Any]:
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return fit_alone(model, fed("arrays", (x, y), batch), callbacks=[Looks()])

    both(script)


@feature
def metrics_of_predictions_of_one_dimension() -> None:
    """The axis over which they are taken is that of the rows."""
    x, y = rows("ragged")

    def script(batch: int) -> dict[str, Any]:
        inputs = keras.Input((5,))
        model = keras.Model(inputs, keras.ops.squeeze(keras.layers.Dense(1, activation="sigmoid")(inputs), -1))
        deterministic_weights(model)
        kinds = [keras.metrics.CosineSimilarity(), keras.metrics.KLDivergence()]
        if hasattr(keras.metrics, "PearsonCorrelation"):
            kinds += [keras.metrics.PearsonCorrelation(), keras.metrics.ConcordanceCorrelation()]
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[*kinds, "mae"])
        return fit_evaluate_predict(model, fed("arrays", (x, y[:, 0]), batch), x, y[:, 0], batch)

    both(script)


@feature
def logs_that_are_no_floats() -> None:
    x, y = rows("even")

    class Counting(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            rows, own = tf.shape(data[0])[0], tf.reduce_any(data[0] > 0)
            step = self.optimizer.iterations + 0
            return {**logs, "own": own, "rows": rows, "all": kdist.all_reduce(rows), "step": step}

    with logged() as said, kdist.scope(scale_lr=None):
        model = Counting([keras.Input((5,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        logs = model.fit(x, y, batch_size=BATCH, verbose=0).history
    assert logs["rows"] == logs["all"] == [BATCH * size()]
    told = [each for each in said if "are no floats" in each]
    assert [": own. " in each for each in told] == ([True] if kdist.rank() == 0 else []), told
