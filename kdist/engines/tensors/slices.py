"""`tf.IndexedSlices` among the tensors to sum: their indices and values are gathered."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def split(tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the tensors that are to be summed, and the parts of slices that are to be gathered."""
    dense = [tensor for tensor in tensors if not isinstance(tensor, tf.IndexedSlices)]
    slices = [tensor for tensor in tensors if isinstance(tensor, tf.IndexedSlices)]
    return dense, [part for each in slices for part in (each.indices, each.values)]


def merge(
    tensors: Sequence[tf.Tensor | tf.IndexedSlices], sums: Sequence[tf.Tensor], gathered: Sequence[tf.Tensor]
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Undoes `split`: returns the sums and the gathered slices, in the order of `tensors`."""
    total, part = iter(sums), iter(gathered)
    return [
        tf.IndexedSlices(indices=next(part), values=next(part), dense_shape=tensor.dense_shape)
        if isinstance(tensor, tf.IndexedSlices)
        else next(total)
        for tensor in tensors
    ]


def any_length(shape: tf.TensorShape) -> tf.TensorShape:
    """Returns the shape with an unknown first dimension."""
    return shape if shape.rank is None else tf.TensorShape([None, *shape[1:]])
