"""Metrics are summed states: every rank keeps its own and all are added at defined points."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.engines.engine import Engine


@contextlib.contextmanager
def scalars_weighted(metrics: Sequence[keras.metrics.Metric], weight: Callable[[], tf.Tensor]) -> Iterator[None]:
    """Counts what is handed to `Mean` and `Sum` as one number for a whole batch by the rank's share.

    One process would hand over one number a step; N ranks hand over N. Weighted by the ranks' shares they add up to
    that one number.

    Args:
        metrics: the metrics that are meant.
        weight: callable that returns the rank's share, a scalar tensor.
    """
    classes = (keras.metrics.Mean, keras.metrics.Sum)
    meant = {id(metric) for metric in metrics}
    originals = [cls.update_state for cls in classes]

    def weighted(original: Callable[..., Any]) -> Callable[..., Any]:
        def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
            if id(self) in meant and sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0:
                sample_weight = tf.cast(weight(), self.dtype)
            return original(self, values, sample_weight=sample_weight)

        return update_state

    # The classes, for `MeanMetricWrapper` calls its parent's method; while a step is traced or run, and no longer.
    for cls, original in zip(classes, originals, strict=True):
        cls.update_state = weighted(original)
    try:
        yield
    finally:
        for cls, original in zip(classes, originals, strict=True):
            cls.update_state = original


def flat_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the metrics of a model, those inside of compiled lists included."""
    flat: list[keras.metrics.Metric] = []
    pending = list(model.metrics)
    while pending:
        metric = pending.pop(0)
        flat.append(metric)
        pending.extend(getattr(metric, "metrics", []))
        pending.extend(getattr(metric, "_metrics", []))
    return flat


def add_over_ranks(engine: Engine, variables: Sequence[keras.Variable], before: Sequence[tf.Tensor]) -> None:
    """Adds what each rank has added to metric variables since a common state, in one message.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks talk to each other.
        variables: sequence of metric variables; equal on all ranks afterwards.
        before: sequence of tensors, their values in the common state.
    """
    if not variables:
        return
    added = engine.allreduce([_numeric(v.value) - _numeric(b) for v, b in zip(variables, before, strict=True)])
    for variable, start, total in zip(variables, before, added, strict=True):
        if variable.aggregation == "mean":
            total = total / tf.cast(engine.size, total.dtype)
        variable.assign(tf.cast(_numeric(start) + total, variable.dtype))


def _numeric(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.int32) if value.dtype == tf.bool else tf.convert_to_tensor(value)
