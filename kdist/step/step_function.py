"""The functions that methods call at each step, with less overhead in Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._tf_internals import call_flat, call_on_iterator
from kdist.step.traced_rows import TracedRows


class StepFunction:
    """Replaces the function that Keras made for a model's steps.

    At each call of Keras' function TensorFlow inspects the iterator, or the batch, and two more operations read an
    `Optional`. That takes longer than a small message. Here an iterator is inspected once per pass, and a batch of the
    same shapes and dtypes as before is not.

    Args:
        model: `keras.Model`.
        make: callable that returns Keras' function of an iterator or a list of batches. It runs eager steps, steps on a
            given batch of a structure, and several steps per execution.
        rows: `TracedRows` of this kind of step.
    """

    def __init__(self, model: keras.Model, make: Callable[[], Callable[[Any], Any]], rows: TracedRows) -> None:
        self._model = model
        self._make = make
        self._rows = rows
        self._traced: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # an iterator holds data
        self._traced_on_batches: dict[Any, Any] = {}
        self._is_function_traced = False
        self._make_functions()

    def _make_functions(self) -> None:
        self._function = function = self._make()
        self._step = tf.function(
            lambda iterator: function([iterator.get_next()]), reduce_retracing=True, autograph=False
        )
        self._step_on_batch = tf.function(lambda batch: function([batch]), reduce_retracing=True, autograph=False)

    def __call__(self, iterator: Any) -> Any:
        """Runs a step on the iterator's next element."""
        if not self._is_traced():
            return self._function(iterator)
        if not isinstance(iterator, tf.data.Iterator):
            batches = list(iterator)  # `predict` has several per execution
            return self._on_batch(batches[0]) if len(batches) == 1 else self._function(batches)
        if self._model.steps_per_execution != 1:
            return self._call_function(iterator, lambda: self._step, iterator)
        traced = self._traced.get(iterator)
        if traced is None:
            traced = self._traced[iterator] = self._trace(lambda: self._step, iterator)
        return call_on_iterator(traced, iterator)

    def _on_batch(self, batch: Any) -> Any:
        """Runs a step on a batch, usually a tuple of arrays and `None`."""
        if type(batch) is not tuple or not all(map(_is_plain, batch)):
            return self._call_function([batch], lambda: self._step_on_batch, batch)
        tensors = [None if each is None else tf.convert_to_tensor(each) for each in batch]
        key = tuple(None if each is None else (each.dtype, each.shape) for each in tensors)
        traced = self._traced_on_batches.get(key)
        if traced is None:
            traced = self._traced_on_batches[key] = self._trace(lambda: self._step_on_batch, tuple(tensors))
        return call_flat(traced, [each for each in tensors if each is not None])

    def _call_function(self, argument: Any, step: Callable[[], Any], data: Any) -> Any:
        if not (self._is_function_traced or self._rows.is_final):
            self._trace(step, data)  # Keras' function takes its graph from there
            self._is_function_traced = True
        return self._function(argument)

    def _trace(self, step: Callable[[], Any], data: Any) -> Any:
        return self._rows.traced(lambda: step().get_concrete_function(data), self._make_functions)

    def _is_traced(self) -> bool:
        is_eager = self._model.run_eagerly or tf.config.functions_run_eagerly()
        return tf.executing_eagerly() and not is_eager


def _is_plain(part: Any) -> bool:
    """Returns whether a part of a batch is dense, or there is none."""
    if isinstance(part, np.ndarray):
        return part.dtype.kind in "biuf"
    return part is None or isinstance(part, tf.Tensor)
