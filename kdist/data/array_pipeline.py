"""The `tf.data` pipeline that gathers a rank's rows of arrays.

To trace a pipeline's functions takes as long as many a small step, so they are traced once a process, and called with
what differs: the arrays, the steps, and the number under which the order of a pass is asked for.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from kdist.data.batch import Shard, lists_to_tuples
from kdist.data.graphs.own_functions import applied, map_op, traced

_SCALAR = tf.TensorSpec([], tf.int64)
_VECTOR = tf.TensorSpec([None], tf.int64)


class OrdersPasses(Protocol):
    """What knows the order of a pass."""

    def shard_indices(self) -> Any:
        """Returns the numbers of this rank's rows in a pass that begins, an array of `int64`."""


# TensorFlow never releases the Python functions that it calls: the arrays would stay in memory with their source.
_orders: weakref.WeakValueDictionary[int, OrdersPasses] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def steps_of_passes(order: OrdersPasses, steps: Sequence[Any]) -> tf.data.Dataset:
    """Returns a dataset of the steps of a pass, each with the numbers of the pass's rows.

    Args:
        order: `OrdersPasses`, asked once at the beginning of each pass; it is not kept alive.
        steps: sequence of four `int64` arrays with an entry for each step: where its rows begin and end in the order,
            how many of them count here, and how many on all ranks.

    Returns:
        A dataset of `(start, stop, rows, global_rows, indices)`.
    """
    number = next(_numbers)
    _orders[number] = order
    numbers = tf.data.Dataset.from_tensors(tf.constant(number, tf.int64))
    passes = applied(map_op, numbers, _order_of_pass(), (), _VECTOR)
    element = (*[_SCALAR] * 4, _VECTOR)
    return applied(tf.raw_ops.FlatMapDataset, passes.prefetch(1), _steps_of_pass(), steps, element)


def gathered(steps: tf.data.Dataset, inputs: Any, size: int | None) -> tf.data.Dataset:
    """Returns the dataset of `Shard` of dense tensors.

    Args:
        steps: dataset as `steps_of_passes` returns it.
        inputs: structure of dense tensors and of `None`.
        size: int or `None`, the rows of each step, if known.
    """
    inputs = lists_to_tuples(inputs)
    tensors = [leaf for leaf in tf.nest.flatten(inputs) if leaf is not None]
    specs = tuple(tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in tensors)
    rows = iter([tf.TensorSpec([size, *spec.shape[1:]], spec.dtype) for spec in specs])
    data = tf.nest.map_structure(lambda leaf: _nothing() if leaf is None else next(rows), inputs)
    return applied(map_op, steps, _rows_of_step(specs, size), tensors, Shard(data, _SCALAR, _SCALAR))


def gathered_by(steps: tf.data.Dataset, gather: Callable[[Any], Any], size: int | None) -> tf.data.Dataset:
    """Returns the dataset of `Shard` of what a function of the row numbers returns; see `gathered`."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def draw(*step: Any) -> Shard:
        start, stop, rows, global_rows, indices = step
        return Shard(gather(_indices(indices, start, stop, size)), rows, global_rows)

    return steps.map(draw)


def _indices(indices: Any, start: Any, stop: Any, size: int | None) -> Any:
    indices = indices[start:stop]
    indices.set_shape([size])
    return indices


@functools.cache
def _nothing() -> Any:
    """Returns the spec that `tf.data` has for `None`."""
    return tf.data.Dataset.from_tensors((0, None)).element_spec[1]


@functools.cache
def _order_of_pass() -> Any:
    def of_number(number: Any) -> Any:
        return _orders[int(number)].shard_indices()

    def draw(number: Any) -> Any:
        indices = tf.numpy_function(of_number, [number], tf.int64)
        indices.set_shape([None])
        return indices

    return _traced(draw, _SCALAR)


@functools.cache
def _steps_of_pass() -> Any:
    def pair(indices: Any, *steps: Any) -> Any:
        every_step = tf.data.Dataset.from_tensors(indices).repeat()
        slices = tf.data.Dataset.from_tensor_slices(steps)
        return tf.data.experimental.to_variant(tf.data.Dataset.zip(slices, every_step))

    return _traced(pair, _VECTOR, *[_VECTOR] * 4)


@functools.lru_cache(maxsize=64)
def _rows_of_step(specs: tuple[tf.TensorSpec, ...], size: int | None) -> Any:
    def draw(start: Any, stop: Any, rows: Any, global_rows: Any, indices: Any, *tensors: Any) -> Any:
        indices = _indices(indices, start, stop, size)
        return [*(tf.gather(tensor, indices) for tensor in tensors), rows, global_rows]

    return _traced(draw, *[_SCALAR] * 4, _VECTOR, *specs)


def _traced(function: Callable[..., Any], *signature: Any) -> Any:
    with tf.init_scope():
        return traced(function, *signature)
