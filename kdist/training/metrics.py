"""Metrics are summed states: every rank keeps its own and all are added at defined points."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.engines.engine import Engine


@contextlib.contextmanager
def scalars_weighted(metrics: Sequence[keras.metrics.Metric], weight: Callable[[], tf.Tensor]) -> Iterator[None]:
    """Counts what is handed to `Mean` as one number for a whole batch by the rank's share.

    One process would hand over one number a step, a mean of its batch; N ranks hand over N. Weighted by the ranks'
    shares they add up to that one number. (What is handed to `Sum` is a count, of which each rank has its part.)

    Args:
        metrics: the metrics that are meant.
        weight: callable that returns the rank's share, a scalar tensor.
    """
    meant = {id(metric) for metric in metrics}
    original = keras.metrics.Mean.update_state

    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        if id(self) in meant and sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0:
            sample_weight = tf.cast(weight(), self.dtype)
        return original(self, values, sample_weight=sample_weight)

    # The class, for `MeanMetricWrapper` calls its parent's method; while a step is traced or run, and no longer.
    keras.metrics.Mean.update_state = update_state
    try:
        yield
    finally:
        keras.metrics.Mean.update_state = original


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


class MetricsOfPass:
    """A model's metrics in a pass over the data: each rank counts its own rows, and at the end all are added.

    Args:
        model: `keras.Model`.
        engine: `Engine`, how the ranks talk to each other.
    """

    def __init__(self, model: keras.Model, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        self._start: dict[int, tf.Tensor] = {}
        self._resumed: list[Any] | None = None

    def begin(self) -> None:
        """Notes what all ranks have in common."""
        self._start = {id(v): tf.identity(v.value) for v in self._model.metrics_variables}
        if self._resumed is not None:
            for variable, value in zip(self._model.metrics_variables, self._resumed, strict=True):
                variable.assign(value)
            self._resumed = None

    def end(self) -> None:
        """Adds what each rank has counted since.

        Collective: every rank must call this, in the same order.
        """
        variables = self._model.metrics_variables
        add_over_ranks(self._engine, variables, [self._start.get(id(v), tf.zeros_like(v.value)) for v in variables])
        self.begin()  # an evaluation within an epoch: what follows is added to what all ranks have now

    def shares(self) -> list[Any]:
        """Returns what each rank has, arrays with one entry a rank.

        Collective: every rank must call this, in the same order.
        """
        values = [tf.convert_to_tensor(variable.value)[tf.newaxis] for variable in self._model.metrics_variables]
        return [np.asarray(value) for value in self._engine.allgather(values)]

    def resume(self, shares: Sequence[Any]) -> None:
        """Goes on, when the next pass begins, with what the ranks of an interrupted training had.

        Args:
            shares: sequence of arrays, as `shares` has returned them, of any number of ranks.
        """
        self._resumed = [
            _share(variable, share, self._engine)
            for variable, share in zip(self._model.metrics_variables, shares, strict=True)
        ]


def _share(variable: keras.Variable, shares: Any, engine: Engine) -> Any:
    if len(shares) == engine.size:
        return shares[engine.rank]
    if variable.aggregation == "mean":
        return shares.mean(axis=0)
    total = shares.any(axis=0) if shares.dtype == bool else shares.sum(axis=0, dtype=shares.dtype)
    return total if engine.rank == 0 else np.zeros_like(total)


def _numeric(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.int32) if value.dtype == tf.bool else tf.convert_to_tensor(value)
