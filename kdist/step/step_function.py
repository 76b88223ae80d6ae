"""The functions that methods call at each step, with less overhead in Python, and when a step is traced again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._tf_internals import ResourceVariable, call_flat, call_on_iterator


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


class TracedRows:
    """Whether the graphs of one kind of a model's steps know the number of their rows.

    A graph that knows the number may hold it as a constant, which nothing tells from a constant of the user's. A step
    that computes losses by hand is traced without the number, one for which it turns out to matter is traced again. If
    a trace without it raises, as where a layer reads it, the step is traced with it from then on.

    Args:
        are_unknown: bool, whether steps are traced without the number from the first trace on.

    Attributes:
        are_unknown: bool, whether steps are traced without the number.
        is_final: bool, whether that does not change any more.
    """

    def __init__(self, *, are_unknown: bool = False) -> None:
        self.are_unknown = are_unknown
        self.is_final = are_unknown
        self._can_trace_again = False
        self._is_asked = False
        self._has_failed = False
        self._makes_values = False
        self._has_made = False

    def traced(self, trace: Callable[[], Any], renew: Callable[[], None], *, is_first: bool = True) -> Any:
        """Traces the step, without running it, and again if the number of rows is to be hidden or cannot be.

        As TensorFlow does, it traces a step once more that has made variables: Keras and users ask whether there are
        any, as an optimizer asks whether it is built.

        Args:
            trace: callable that traces it and returns the result.
            renew: callable after which `trace` traces a new function.
            is_first: bool, whether variables that the step makes have their values at once.
        """
        self._can_trace_again, self._is_asked, self._has_failed = not self.is_final, False, False
        self._makes_values, self._has_made = is_first, False
        try:
            result = trace()
        except Exception:
            if not self._has_failed:
                raise
            self.are_unknown, self.is_final = False, True
        else:
            if not (self._is_asked or self._has_made):
                return result
            self.are_unknown = self.are_unknown or self._is_asked
            is_first = is_first and not self._has_made
        finally:
            self._can_trace_again = self._makes_values = False
        renew()
        return self.traced(trace, renew, is_first=is_first)

    def hide_row_count(self) -> None:
        """Traces the step without the number of its rows from the next trace on, if that is possible."""
        self.are_unknown = self.are_unknown or not self.is_final

    def is_traced_again(self, *, knows_number: bool) -> bool:
        """Returns whether the step, of which something is to be computed now, is traced again, as it then can be.

        Args:
            knows_number: bool, whether the graph knows the number of rows, which is then hidden.
        """
        self._is_asked = self._is_asked or (self._can_trace_again and knows_number and not self.are_unknown)
        return self._is_asked

    @property
    def is_asked(self) -> bool:
        """Whether something has asked for the step to be traced again: what this trace finds does not count."""
        return self._is_asked

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """A context in which a step is traced, or runs eagerly."""
        try:
            with tf.variable_creator_scope(self._with_value):
                yield
        except Exception:
            self._has_failed = self.are_unknown and not tf.executing_eagerly()
            raise

    def _with_value(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        made = variable_with_value(kwargs) if self._makes_values else None
        self._has_made = self._has_made or made is not None
        return next_creator(**kwargs) if made is None else made


def variable_with_value(kwargs: Mapping[str, Any]) -> tf.Variable | None:
    """Returns a variable that has its value, though a function is being traced that makes it, or `None`.

    TensorFlow gives such a variable its value when the function runs. But gradients and losses of all rows are found
    out, and slots are made in parts, while the function is traced: they read variables.

    Args:
        kwargs: mapping, the arguments of a variable creator. `None` is returned if their initial value is no function,
            or is computed of the graph's tensors.
    """
    if not (callable(kwargs.get("initial_value")) and tf.inside_function()):
        return None
    if kwargs.get("experimental_enable_variable_lifting") is False:
        return None
    unknown = ("collections", "colocate_with", "use_resource")
    arguments = {name: value for name, value in kwargs.items() if name not in unknown}
    device = getattr(kwargs.get("colocate_with"), "device", None)
    try:
        with tf.init_scope(), contextlib.nullcontext() if device is None else tf.device(device):
            return ResourceVariable(**{"distribute_strategy": tf.distribute.get_strategy(), **arguments})
    except (TypeError, ValueError, NotImplementedError):  # how TensorFlow refuses a tensor of another graph
        return None
