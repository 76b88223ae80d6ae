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


def gathered_shapes(
    tensors: Sequence[tf.Tensor], lengths: Sequence[Sequence[int]] | None = None
) -> list[tf.TensorShape]:
    """Returns the shapes of tensors whose rows are gathered; `lengths` are their rows on each rank, if known."""
    if lengths is None:
        return [any_length(tensor.shape) for tensor in tensors]
    return [tf.TensorShape([sum(counts), *tensor.shape[1:]]) for tensor, counts in zip(tensors, lengths, strict=True)]


def any_length(shape: tf.TensorShape) -> tf.TensorShape:
    """Returns the shape with an unknown first dimension."""
    return shape if shape.rank is None else tf.TensorShape([None, *shape[1:]])
