"""Sets a model's metrics back by one call of a graph: Keras runs two operations for each of their variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdist._tf_internals import call_flat
from kdist.keras_hooks.metrics import flat_metrics, resets_by_assignments
from kdist.keras_hooks.trainer import is_overridden, runs_eagerly


class MetricReset:
    """Replaces a model's `reset_metrics`.

    Args:
        model: `keras.Model`.
        reset: callable, its class's method. It runs where any Python of the user's may be called.
    """

    def __init__(self, model: keras.Model, reset: Callable[[], None]) -> None:
        self._model = model
        self._reset = reset
        self._variables: list[Any] = []
        self._graph: Any = None

    def __call__(self) -> None:
        """Sets the metrics back."""
        if not self._is_a_graph():
            self._reset()
            return
        variables = self._model.metrics_variables
        if list(map(id, variables)) != list(map(id, self._variables)):
            self._graph = tf.function(self._reset, autograph=False).get_concrete_function()
            self._variables = variables
        if variables:
            call_flat(self._graph, [])

    def _is_a_graph(self) -> bool:
        model = self._model
        return (
            tf.executing_eagerly()
            and not runs_eagerly(model)
            and not is_overridden(model, "reset_metrics")
            and all(map(resets_by_assignments, flat_metrics(model)))
        )
