"""Random losses, metrics, layers, counters and penalties, built of `keras.ops`: N ranks against one process.

A case is three examples that hypothesis draws from a seed: the same on all ranks, and not the simplest, its first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st
from keras import ops

import kdist
from tests.training.features.counters import ADDITIONS
from tests.training.fidelity import both, deterministic_weights, fed, fit_evaluate_predict, outcome, rows, size

EXAMPLES_A_CASE = 3
NUM_CASES = 100

ERRORS: dict[str, Callable[[Any, Any], Any]] = {
    "squared": lambda t, p: (t - p) ** 2,
    "absolute": lambda t, p: ops.abs(t - p),
    "logistic": lambda t, p: ops.softplus(-t * p),
    "quartic": lambda t, p: ops.tanh(t - p) ** 4,
}
WEIGHTS: dict[str, Callable[[Any, Any], Any]] = {
    "ones": lambda t, p: ops.ones_like(p),
    "mask": lambda t, p: ops.cast(ops.abs(t) > 0.7, p.dtype),
    "of the batch": lambda t, p: ops.softmax(t, axis=0),
    "of the size": lambda t, p: ops.abs(t) / (1 + ops.abs(t)),
}
REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "per row": lambda e, w: ops.mean(e * w, axis=-1),
    "mean": lambda e, w: ops.mean(e * w),
    "sum": lambda e, w: ops.sum(e * w) / 10,
    "weighted mean": lambda e, w: ops.sum(e * w) / (ops.sum(w) + 0.1),
    "root": lambda e, w: ops.sqrt(ops.mean(e * w) + 0.01),
    "largest": lambda e, w: ops.max(e * w),
    "spread": lambda e, w: ops.std(e * w),
    "soft maximum": lambda e, w: ops.logsumexp(e * w),
    "across": lambda e, w: ops.mean(ops.matmul(e, ops.transpose(w))),
}
FUNCTIONS = st.tuples(
    st.sampled_from(sorted(ERRORS)), st.sampled_from(sorted(WEIGHTS)), st.sampled_from(sorted(REDUCTIONS))
)


def function_of(parts: tuple[str, str, str]) -> Callable[[Any, Any], Any]:
    error, weight, reduction = ERRORS[parts[0]], WEIGHTS[parts[1]], REDUCTIONS[parts[2]]
    return lambda t, p: reduction(error(t, p), weight(t, p))


class OwnLoss(keras.losses.Loss):
    def __init__(self, function: Callable[[Any, Any], Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.function(y_true, y_pred)


class OwnMetric(keras.metrics.Metric):
    """A state that is updated with the value of a batch."""

    def __init__(self, function: Callable[[Any, Any], Any], update: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function, self.update = function, update
        self.state = self.add_weight(name="state", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        value = ops.mean(self.function(y_true, y_pred))
        new = {
            "largest": lambda: ops.maximum(self.state, value),
            "product": lambda: (1 + self.state) * (1 + 0.1 * value) - 1,
            "average": lambda: 0.9 * self.state + 0.1 * value,
            "sum": lambda: self.state + value,
        }[self.update]()
        self.state.assign(new)

    def result(self) -> Any:
        return self.state


class OwnLayer(keras.layers.Layer):
    """Statistics of the batch, by a collective of kdist."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def call(self, x: Any) -> Any:
        if self.op == "rows":
            return x + ops.matmul(x, ops.transpose(kdist.all_gather(x))) @ kdist.all_gather(x) / 100
        local = {"sum": ops.sum, "mean": ops.mean, "max": ops.max, "min": ops.min}[self.op](x, axis=0)
        return x - 0.1 * kdist.all_reduce(local, self.op)


class Counting(keras.layers.Layer):
    """Counts rows twice: of 1 a step, eager steps on several ranks would not know whether it is a row."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.kept = tf.Variable(np.zeros(3, "int64"), trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            ADDITIONS[self.way](self.kept, 2 * tf.shape(x, tf.int64)[0])
        return x


PENALTIES: dict[str, Callable[[Any], Any]] = {
    "squares": lambda x: 0.1 * ops.mean(x**2),
    "absolute": lambda x: ops.mean(ops.abs(x)),
    "per row": lambda x: 0.1 * ops.mean(ops.logsumexp(x, axis=-1)),
    "of rows that count": lambda x: 0.1 * ops.mean(ops.where(x > 0, x, 0.5 * x**2)),
}
BY_HAND: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: 0.01 * ops.sum(x**2),
    "sum of chosen rows": lambda x: 0.01 * ops.sum(tf.boolean_mask(x, x[:, 0] > 0) ** 2),
    "weighted mean": lambda x: ops.sum(x**2 * ops.abs(x)) / (ops.sum(ops.abs(x)) + 0.1),
    "of weights that add up to one": lambda x: ops.sum(x * (ops.exp(x) / ops.sum(ops.exp(x), axis=0))),
    "mean of chosen elements": lambda x: (
        ops.sum(ops.where(x > 0, x, 0)) / ops.maximum(ops.sum(ops.cast(x > 0, x.dtype)), 1)
    ),
    "root": lambda x: ops.sqrt(ops.mean(x**2) + 0.01),
    "spread": lambda x: ops.mean(ops.std(x, axis=0)),
    "normalized": lambda x: ops.mean(ops.tanh((x - ops.mean(x, axis=0)) / (ops.std(x, axis=0) + 0.1)) ** 3),
    "covariance": lambda x: (
        0.1 * ops.sum((ops.transpose(x) @ (x - ops.mean(x, axis=0)) / ops.cast(ops.shape(x)[0], x.dtype)) ** 2)
    ),
    "a mean and a sum": lambda x: ops.mean(x**2) / 3 - 0.01 * ops.sum(x),
}
PENALTIES |= BY_HAND


class Penalty(keras.layers.Layer):
    """`add_loss`, as Keras' guides use it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def call(self, x: Any) -> Any:
        self.add_loss(self.function(x))
        return x


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "loss": draw(FUNCTIONS),
        "is_class": draw(st.booleans()),
        "metric": draw(FUNCTIONS),
        "update": draw(st.sampled_from(["largest", "product", "average", "sum"])),
        "layer": draw(st.sampled_from([None, "rows", "sum", "mean", "max", "min"])),
        "shape": draw(st.sampled_from(["even", "ragged", "one short", "few"])),
        "kind": draw(st.sampled_from(["arrays", "tf_data"])),
        "eager": draw(st.booleans()),
        "counting": draw(st.none() | st.sampled_from(sorted(ADDITIONS))),
        "penalty": draw(st.none() | st.sampled_from(sorted(PENALTIES))),
        "scale_batch": draw(st.booleans()),
        "weighted": draw(st.booleans()),
    }


def compare(program: dict[str, Any]) -> None:
    x, y = rows(program["shape"])
    loss, metric = function_of(program["loss"]), function_of(program["metric"])

    def script(batch: int) -> dict[str, Any]:
        inner = [] if program["layer"] is None else [OwnLayer(program["layer"])]
        # Of several ranks with one row each no graph says that they count rows (docs/limits.md).
        has_counter = program["counting"] is not None and not (program["shape"] == "few" and size() > 2)
        counting = [Counting(program["counting"])] if has_counter else []
        penalty = program["penalty"]
        # Eager steps take all for means; and rows that are gathered before are not followed (docs/limits.md).
        if penalty in BY_HAND and (program["eager"] or program["layer"] == "rows"):
            penalty = None
        inner += [*counting, *([] if penalty is None else [Penalty(PENALTIES[penalty])])]
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, "tanh"), *inner, keras.layers.Dense(2)])
        deterministic_weights(model)
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.5),
            OwnLoss(loss) if program["is_class"] else loss,
            metrics=[metric],
            weighted_metrics=[OwnMetric(metric, program["update"], name="own")],
            run_eagerly=program["eager"],
        )
        weight = [np.linspace(0.1, 3.0, len(x))] if program["weighted"] else []
        data = fed(program["kind"], (x, y, *weight), batch)
        if program["kind"] != "arrays":
            found = outcome(model, model.fit(**data, epochs=1, verbose=0))
        else:
            found = fit_evaluate_predict(model, data, x, y, batch)
        return {**found, "counts": [each.kept.numpy() for each in counting]}

    if program["scale_batch"]:
        both(script)
    else:
        both(lambda _: script(6), scale_batch=False)


def case(number: int, drawn: st.SearchStrategy[Any], compare: Callable[[Any], None]) -> Callable[[], None]:
    """Returns a case that compares what hypothesis draws from a seed: the same on all ranks, and not the simplest."""
    places = itertools.count()

    @hypothesis.seed(number)
    @hypothesis.settings(
        max_examples=1 + EXAMPLES_A_CASE,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],  # ranks that shrink may part
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(drawn)
    def examples(example: Any) -> None:
        if next(places) == 0:
            return  # the simplest
        try:
            compare(example)
        except AssertionError as error:
            raise AssertionError(f"{example}: {error}") from error

    return examples


RANDOM = {f"random_programs_{number}": case(number, programs(), compare) for number in range(NUM_CASES)}
