"""Datasets whose elements can be read by their number: slices of tensors, ranges, and what is zipped of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from kdist.data.graphs.dataset_internals import attributes, inputs, is_known, kind


class Indexed(NamedTuple):
    """What yields the elements of a dataset by their numbers.

    Attributes:
        length: int, the number of elements.
        gather: callable that takes an `int64` vector of numbers below `length` and returns these elements, batched.
    """

    length: int
    gather: Callable[[Any], Any]


def indexed(dataset: Any) -> Indexed | None:
    """Returns how elements of a dataset are read by their number; `None` if they must be iterated over."""
    op, spec = attributes(dataset), dataset.element_spec
    if not is_known(dataset):
        return None
    if kind(dataset) == "Range":
        start, stop, step = (int(value) for value in (op.start, op.stop, op.step))
        return Indexed(len(range(start, stop, step)), lambda numbers: tf.cast(start + step * numbers, spec.dtype))
    if kind(dataset) in ("Options", "Prefetch"):
        return indexed(*inputs(dataset))
    if kind(dataset) == "Zip":
        return _zipped(dataset)
    leaves = tf.nest.flatten(spec)
    if kind(dataset) != "TensorSlice" or not all(_is_dense(leaf) for leaf in leaves):
        return None
    tensors = op.tensors

    def gather(numbers: Any) -> Any:
        return tf.nest.pack_sequence_as(spec, [tf.gather(tensor, numbers) for tensor in tensors])

    return Indexed(len(tensors[0]), gather)


def _zipped(dataset: Any) -> Indexed | None:
    parts = [indexed(each) for each in inputs(dataset)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None

    def gather(numbers: Any) -> Any:
        leaves = tf.nest.flatten([part.gather(numbers) for part in known])
        return tf.nest.pack_sequence_as(dataset.element_spec, leaves)

    return Indexed(min(part.length for part in known), gather)


def _is_dense(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec) and spec.dtype not in (tf.variant, tf.resource)
