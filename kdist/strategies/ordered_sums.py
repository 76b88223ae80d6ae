"""Sums of a sparse gradient's rows in one order on all ranks.

TensorFlow adds rows of one index to a variable in no fixed order, on GPUs, and with several threads on CPUs, so that
ranks would round otherwise.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kdist._tf_internals import BaseResourceVariable
from kdist.keras_hooks.patching import patched

_SUMS = ("scatter_add", "scatter_sub")

_is_open = contextvars.ContextVar("kdist.ordered_sums", default=False)


@contextlib.contextmanager
def ordered_sums() -> Iterator[None]:
    """Adds up rows of one index on the CPU, before a variable or a dense tensor gets them, while the context is open.

    The values of each index are summed as they come. Optimizers that square the rows before still do so.
    """
    if _is_open.get():
        yield
        return
    _register_conversion()
    token = _is_open.set(True)
    try:
        with contextlib.ExitStack() as stack:
            for name in _SUMS:
                method = _with_single_rows(getattr(BaseResourceVariable, name))
                stack.enter_context(patched(BaseResourceVariable, name, method))
            yield
    finally:
        _is_open.reset(token)


def with_single_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns slices of the same sum with one row for each index, in the order in which the indices come first."""
    with tf.device("/CPU:0"):  # whose kernel adds rows in their order
        indices, places = tf.unique(slices.indices)
        values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _with_single_rows(scatter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scatter)
    def scatter_single_rows(self: Any, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        is_sparse = isinstance(sparse_delta, tf.IndexedSlices)  # TensorFlow says what is wrong with others
        return scatter(self, with_single_rows(sparse_delta) if is_sparse else sparse_delta, *args, **kwargs)

    return scatter_single_rows


@functools.cache
def _register_conversion() -> None:
    """Registers, once a process, a conversion that comes before TensorFlow's and leaves its work to it elsewhere."""
    tf.register_tensor_conversion_function(tf.IndexedSlices, _converted, priority=99)


def _converted(value: tf.IndexedSlices, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> Any:
    del as_ref
    if not _is_open.get():
        return NotImplemented
    token = _is_open.set(False)
    try:
        return tf.convert_to_tensor(with_single_rows(value), dtype, name=name)
    finally:
        _is_open.reset(token)
