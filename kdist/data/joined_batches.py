"""Several of the user's batches as one: where a step takes other numbers of them than there are ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.data.batch import Rows
from kdist.data.graphs.optionals import from_optional
from kdist.data.groups import grouped
from kdist.data.sharding import Plan
from kdist.errors import DataError

_OTHER_SHAPES = (
    "The batches of a step cannot be joined: their rows have different shapes. Received: the shapes {}. Expected equal "
    "ones, because micro_batches is not the number of ranks. Fix: pad all batches to one length, or make "
    "micro_batches the number of ranks, which then take a batch each."
)


def joined(batches: Sequence[Any]) -> Any:
    """Returns one batch with the rows of several, in their order.

    Args:
        batches: sequence of structures of arrays or tensors, all of one kind. Leaves without rows are the first's.

    Raises:
        DataError: if the rows of a leaf have different shapes, or it is not known which leaves have rows.
    """
    if len(batches) == 1:
        return batches[0]
    rows = Rows(batches[0])
    rows.slice(batches[0], 0, 1)  # raises if it is not known which leaves have rows
    flat = [tf.nest.flatten(batch) for batch in batches]
    leaves = [
        _concatenated(parts) if parts[0] is not None and rows.has_rows(number) else parts[0]
        for number, parts in enumerate(zip(*flat, strict=True))
    ]
    return tf.nest.pack_sequence_as(batches[0], leaves)


def join_batches(batches: tf.data.Dataset, plan: Plan, rows: Rows) -> tf.data.Dataset:
    """Joins each group of `plan.group_size` batches.

    Args:
        batches: `tf.data.Dataset` of batches.
        plan: `Plan`. Groups restart after each `steps_per_epoch` batches.
        rows: `Rows` of the batches.

    Returns:
        A dataset of as large a batch for each step. An iterator of it raises `InvalidArgumentError` where the rows of
        the batches of a step have different shapes.
    """
    spec, size = batches.element_spec, plan.group_size

    def join(optionals: Any, counts: Any) -> Any:
        counts = tf.pad(counts, [[0, size - tf.shape(counts)[0]]])
        counts.set_shape([size])
        parts = []
        for place in range(size):
            there = tf.where(counts[place] > 0, place, tf.argmax(tf.cast(counts > 0, tf.int32), output_type=tf.int32))
            parts.append(rows.slice(from_optional(spec, optionals[there]), 0, counts[place]))
        return joined(parts)

    return grouped(batches, plan, rows.count).map(join)


def _concatenated(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts), expand_nonconcat_dims=True)
    if isinstance(parts[0], tf.RaggedTensor):
        return tf.concat(parts, 0)
    if tf.is_tensor(parts[0]) and not tf.executing_eagerly():
        if parts[0].shape[1:].is_fully_defined():
            return tf.concat(parts, 0)
        shapes = tf.stack([tf.shape(part)[1:] for part in parts])
        check = tf.debugging.Assert(tf.reduce_all(shapes == shapes[0]), [_OTHER_SHAPES.format("below"), shapes])
        with tf.control_dependencies([check]):
            return tf.concat(parts, 0)
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise DataError(_OTHER_SHAPES.format(sorted(shapes)))
    return tf.concat(parts, 0) if tf.is_tensor(parts[0]) else np.concatenate(parts)
