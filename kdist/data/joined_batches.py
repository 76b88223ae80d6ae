"""Several of the user's batches as one: where a step takes other numbers of them than there are ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.data.batch import Rows
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
