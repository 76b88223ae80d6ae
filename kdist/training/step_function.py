"""The function that `fit` and `evaluate` call at each step, without what TensorFlow's Python does around it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdist._tf_internals import call_on_iterator


class StepFunction:
    """Makes a model's steps in the place of the function that Keras made for it.

    Keras' own has its arguments looked at anew at each call, and returns an `Optional`, which two more operations open.
    That takes longer than a small message. Here the iterator is looked at once a pass over the data.

    Args:
        model: `keras.Model`.
        function: callable, Keras' own, which takes an iterator, or a list of batches. It makes the steps where they are
            not one graph each: eagerly, on a batch that was given, and of several steps an execution.
    """

    def __init__(self, model: keras.Model, function: Callable[[Any], Any]) -> None:
        self._model = model
        self._function = function
        self._step = tf.function(
            lambda iterator: function([iterator.get_next()]), reduce_retracing=True, autograph=False
        )
        self._traced: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # an iterator holds data

    def __call__(self, iterator: Any) -> Any:
        """Makes a step on the iterator's next element, or what else Keras' own function makes of it."""
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
