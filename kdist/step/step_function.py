"""The functions that verbs call at each step, with less overhead in Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._tf_internals import call_flat, call_on_iterator


class StepFunction:
    """Replaces the function that Keras made for a model's steps.

    At each call of Keras' function TensorFlow inspects the iterator, or the batch, and two more operations read an
    `Optional`. That takes longer than a small message. Here an iterator is inspected once per pass, and a batch of the
    same shapes and dtypes as before is not.

    Args:
        model: `keras.Model`.
        function: callable, Keras' function of an iterator or a list of batches. It runs eager steps, steps on a given
            batch of a structure, and several steps per execution.
    """

    def __init__(self, model: keras.Model, function: Callable[[Any], Any]) -> None:
        self._model = model
        self._function = function
        self._step = tf.function(
            lambda iterator: function([iterator.get_next()]), reduce_retracing=True, autograph=False
        )
        self._traced: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # an iterator holds data
        self._step_on_batch = tf.function(lambda batch: function([batch]), reduce_retracing=True, autograph=False)
        self._traced_on_batches: dict[Any, Any] = {}

    def __call__(self, iterator: Any) -> Any:
        """Runs a step on the iterator's next element."""
        if not self._is_one_graph():
            return self._function(iterator)
        if not isinstance(iterator, tf.data.Iterator):
            return self._on_batch(next(iter(iterator)))
        traced = self._traced.get(iterator)
        if traced is None:
            traced = self._traced[iterator] = self._step.get_concrete_function(iterator)
        return call_on_iterator(traced, iterator)

    def _on_batch(self, batch: Any) -> Any:
        """Runs a step on a batch, usually a tuple of arrays and `None`."""
        if type(batch) is not tuple or not all(map(_is_plain, batch)):
            return self._function([batch])
        tensors = [None if each is None else tf.convert_to_tensor(each) for each in batch]
        key = tuple(None if each is None else (each.dtype, each.shape) for each in tensors)
        traced = self._traced_on_batches.get(key)
        if traced is None:
            traced = self._traced_on_batches[key] = self._step_on_batch.get_concrete_function(tuple(tensors))
        return call_flat(traced, [each for each in tensors if each is not None])

    def _is_one_graph(self) -> bool:
        return (
            self._model.steps_per_execution == 1
            and not self._model.run_eagerly
            and not tf.config.functions_run_eagerly()
            and tf.executing_eagerly()
        )


def _is_plain(part: Any) -> bool:
    """Returns whether a part of a batch is dense, or there is none."""
    if isinstance(part, np.ndarray):
        return part.dtype.kind in "biuf"
    return part is None or isinstance(part, tf.Tensor)
