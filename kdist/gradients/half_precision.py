"""Half precision: gradients as 16-bit numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.gradients.compression import CompressedSums, Compression, Gradients, full_bytes, is_plain


class HalfPrecision(Compression):
    """Sends gradients as 16-bit numbers.

    Each rank sums its part of the gradients in `float32` (alltoall) and sends the rounded sum to all (allgather). A
    number is rounded twice, on any number of ranks.

    Args:
        half: `tf.float16` or `tf.bfloat16`.
    """

    def __init__(self, half: tf.DType) -> None:
        self._half = half
        self.description = f"{half.name}"

    def sum(self, engine: Engine, gradients: Gradients, exact: Gradients, variables: Sequence[Any]) -> CompressedSums:
        """Sums dense gradients in half precision, and rounds the others first; see `Compression.sum`."""
        dense = [each for each in gradients if is_plain(each)]
        # Slices are gathered, not summed.
        others = [_cast(each, self._half) for each in gradients if not is_plain(each)]
        received = engine.allreduce([*others, *exact])
        rounded, summed = iter(received[: len(others)]), iter(self._sum_dense(engine, dense))
        totals = [next(summed) if is_plain(each) else _cast(next(rounded), each.dtype) for each in gradients]
        return CompressedSums(totals, received[len(others) :], [])

    def num_bytes(self, gradient: tf.Tensor | tf.IndexedSlices) -> int:
        """Returns two bytes for each number."""
        if not gradient.dtype.is_floating:
            return full_bytes(gradient)
        return full_bytes(gradient) * self._half.size // gradient.dtype.size

    def _sum_dense(self, engine: Engine, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if not tensors:
            return []
        sizes = [tensor.shape.num_elements() for tensor in tensors]
        rows = [tf.reshape(tf.cast(tensor, self._half), [-1]) for tensor in tensors]
        padding = -sum(sizes) % engine.size
        parts = tf.reshape(tf.concat([*rows, tf.zeros([padding], self._half)], 0), [engine.size, -1])
        (parts,) = engine.alltoall([parts])
        part = tf.cast(tf.reduce_sum(tf.cast(parts, tf.float32), 0), self._half)
        (total,) = engine.allgather([part])
        totals = tf.split(tf.ensure_shape(total, [sum(sizes) + padding]), [*sizes, padding])[:-1]
        return [
            tf.cast(tf.reshape(total, tensor.shape), tensor.dtype)
            for total, tensor in zip(totals, tensors, strict=True)
        ]


def _cast(gradient: tf.Tensor | tf.IndexedSlices, dtype: tf.DType) -> Any:
    return tf.cast(gradient, dtype) if gradient.dtype.is_floating else gradient  # a complex one
