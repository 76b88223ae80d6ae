"""The function that `fit` and `evaluate` call at each step, with less overhead in Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdist._tf_internals import call_on_iterator


class StepFunction:
    """Replaces the function that Keras made for a model's steps.

    At each call of Keras' function TensorFlow inspects the iterator, and two more operations read an `Optional`. That
    takes longer than a small message. Here the iterator is inspected once per pass.

    Args:
        model: `keras.Model`.
        function: callable, Keras' function of an iterator or a list of batches. It runs eager steps, steps on a given
            batch, and several steps per execution.
    """

    def __init__(self, model: keras.Model, function: Callable[[Any], Any]) -> None:
        self._model = model
        self._function = function
        self._step = tf.function(
            lambda iterator: function([iterator.get_next()]), reduce_retracing=True, autograph=False
        )
        self._traced: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # an iterator holds data

    def __call__(self, iterator: Any) -> Any:
        """Runs a step on the iterator's next element."""
        if not self._is_one_graph(iterator):
            return self._function(iterator)
        traced = self._traced.get(iterator)
        if traced is None:
            traced = self._traced[iterator] = self._step.get_concrete_function(iterator)
        return call_on_iterator(traced, iterator)

    def _is_one_graph(self, iterator: Any) -> bool:
        return (
            isinstance(iterator, tf.data.Iterator)
            and self._model.steps_per_execution == 1
            and not self._model.run_eagerly
            and not tf.config.functions_run_eagerly()
        )
