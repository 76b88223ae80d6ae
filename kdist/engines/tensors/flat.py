"""Tensors as flat buffers that TensorFlow's collective ops take, eagerly and in graphs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.engines.arrays import fusion

# The ops sum four dtypes that hold all others: what is narrower is summed wider (halves are to be summed in float32
# anyway), what is unsigned has the bits of what is signed, and a complex number is two real ones.
_CAST = {
    tf.float16: tf.float32,
    tf.bfloat16: tf.float32,
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint8: tf.int32,
    tf.uint16: tf.int32,
}
_SAME_BITS = {tf.uint32: tf.int32, tf.uint64: tf.int64, tf.complex64: tf.float32, tf.complex128: tf.float64}


def to_array(tensor: tf.Tensor) -> np.ndarray[Any, Any]:
    """Returns an eager tensor's values, without a copy where TensorFlow can: it cannot for a bfloat16 scalar."""
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())


def to_summable(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor's values as a 1-D tensor of `float32`, `float64`, `int32` or `int64`."""
    if tensor.dtype in _SAME_BITS:
        tensor = tf.bitcast(tensor, _SAME_BITS[tensor.dtype])
    elif tensor.dtype in _CAST:
        tensor = tf.cast(tensor, _CAST[tensor.dtype])
    return tf.reshape(tensor, [-1])


def from_summable(flat: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Undoes `to_summable`: returns values of `like`'s shape and dtype."""
    if like.dtype.is_complex:
        flat = tf.bitcast(tf.reshape(flat, [-1, 2]), like.dtype)
    elif like.dtype in _SAME_BITS:
        flat = tf.bitcast(flat, like.dtype)
    elif like.dtype in _CAST:
        flat = tf.cast(flat, like.dtype)
    return shaped(flat, like)


def to_bytes(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor's memory as a 1-D tensor of `uint8`."""
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])


def from_bytes(flat: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undoes `to_bytes`; the values are 1-D."""
    if dtype == tf.bool:
        return tf.cast(flat, tf.bool)
    if dtype.size > 1:
        flat = tf.reshape(flat, [-1, dtype.size])
    return tf.bitcast(flat, dtype)


def to_words(flat: tf.Tensor, num_words: tf.Tensor | int) -> tf.Tensor:
    """Returns bytes as a number of words of `int32`, padded with zeros."""
    num_words = num_words if isinstance(num_words, int) else tf.cast(num_words, tf.int64)
    filled = tf.pad(flat, [[0, 4 * num_words - size(flat)]])
    return tf.bitcast(tf.reshape(filled, [-1, 4]), tf.int32)


def from_words(words: tf.Tensor) -> tf.Tensor:
    """Returns the bytes of a tensor of words, along its last axis."""
    shape = tf.shape(words, tf.int64)
    return tf.reshape(tf.bitcast(words, tf.uint8), tf.concat([shape[:-1], [4 * shape[-1]]], 0))


def pack_words(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the memory of tensors as a 1-D tensor of `int32`: at least one word, as no op sends an empty tensor."""
    mine = tf.concat([to_bytes(tensor) for tensor in tensors], 0)
    num_bytes = size(mine)
    if isinstance(num_bytes, int):
        return to_words(mine, max(-(-num_bytes // 4), 1))
    return to_words(mine, tf.maximum(-(-num_bytes // 4), 1))


def unpack_words(words: tf.Tensor, like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.Tensor]:
    """Undoes `pack_words`: returns tensors of the shapes and dtypes of `like`."""
    sizes = [size(each) * each.dtype.size for each in like]
    parts = split(from_words(words)[: sum(sizes)], sizes)
    return [shaped(from_bytes(part, each.dtype), each) for part, each in zip(parts, like, strict=True)]


def rows_to_words(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the rows of tensors that have as many of them, side by side, as the rows of one matrix of `int32`.

    The tensors' other dimensions must be known. A row has at least one word, for no op sends an empty tensor.
    """
    widths = [_row_bytes(tensor) for tensor in tensors]
    num_rows = tf.shape(tensors[0])[0]
    parts = [tf.reshape(to_bytes(each), [num_rows, width]) for each, width in zip(tensors, widths, strict=True)]
    num_words = max(-(-sum(widths) // 4), 1)
    filled = tf.pad(tf.concat(parts, 1), [[0, 0], [0, 4 * num_words - sum(widths)]])
    words = tf.bitcast(tf.reshape(filled, [num_rows, num_words, 4]), tf.int32)
    return tf.ensure_shape(words, [tensors[0].shape[0], num_words])


def rows_from_words(words: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Undoes `rows_to_words`, for any number of rows."""
    widths = [_row_bytes(tensor) for tensor in like]
    parts = tf.split(from_words(words)[:, : sum(widths)], widths, axis=1)
    num_rows = tf.shape(words)[0]
    return [
        tf.ensure_shape(
            tf.reshape(from_bytes(tf.reshape(part, [-1]), each.dtype), [num_rows, *each.shape[1:]]),
            [words.shape[0], *each.shape[1:]],
        )
        for part, each in zip(parts, like, strict=True)
    ]


def _row_bytes(tensor: tf.Tensor) -> int:
    return tensor.shape[1:].num_elements() * tensor.dtype.size


def rows_by_rank(tensor: tf.Tensor, num_ranks: int) -> tf.Tensor:
    """Returns a tensor's parts for `reduce_scatter`, one for each rank, stacked; shorter ones are padded with zeros."""
    bounds = fusion.part_bounds(tensor.shape[0], num_ranks)
    longest = -(-tensor.shape[0] // num_ranks)
    tail = [[0, 0]] * (tensor.shape.rank - 1)
    return tf.stack(
        [tf.pad(tensor[start:end], [[0, longest - (end - start)], *tail]) for start, end in itertools.pairwise(bounds)]
    )


def part(tensor: tf.Tensor, rank: int, num_ranks: int) -> tf.Tensor:
    """Returns the rows of a tensor that are a rank's part in `reduce_scatter`."""
    bounds = fusion.part_bounds(tensor.shape[0], num_ranks)
    return tensor[bounds[rank] : bounds[rank + 1]]


def sum_of_parts(received: tf.Tensor, like: tf.Tensor, rank: int) -> tf.Tensor:
    """Returns the sum of what all ranks have sent of this rank's part of `like`, added in rank order."""
    num_rows = part(like, rank, received.shape[0]).shape[0]
    summed = fusion.sum_dtype(np.dtype(like.dtype.as_numpy_dtype))
    parts = [tf.cast(part[:num_rows], summed) for part in tf.unstack(received)]
    return tf.cast(functools.reduce(tf.add, parts), like.dtype)


def size(tensor: tf.Tensor | tf.TensorSpec) -> tf.Tensor | int:
    """Returns the number of elements: an int where it is known, else a scalar tensor."""
    known = tensor.shape.num_elements()
    return tf.size(tensor, tf.int64) if known is None else known


def split(flat: tf.Tensor, sizes: Sequence[tf.Tensor | int]) -> list[tf.Tensor]:
    """Cuts a 1-D tensor into parts of the given sizes."""
    if len(sizes) == 1:
        return [flat]
    return tf.split(flat, tf.stack([tf.cast(each, tf.int64) for each in sizes]), num=len(sizes))


def shaped(flat: tf.Tensor, like: tf.Tensor | tf.TensorSpec) -> tf.Tensor:
    """Returns the values in the shape of `like`."""
    known = like.shape.is_fully_defined()
    return tf.ensure_shape(tf.reshape(flat, like.shape if known else tf.shape(like)), like.shape)


def sum_together(tensors: Sequence[tf.Tensor], sum_buffers: Callable[[list[tf.Tensor]], list[tf.Tensor]]) -> list[Any]:
    """Sums tensors of known shapes; small ones that are summed in the same dtype share a buffer.

    Args:
        tensors: sequence of tensors.
        sum_buffers: callable that sums a list of 1-D tensors over all ranks, each in its own dtype.

    Returns:
        A list of tensors of the same shapes and dtypes.
    """
    signature = tuple((np.dtype(each.dtype.as_numpy_dtype), size(each)) for each in tensors)
    layouts = fusion.layouts(signature)
    sums: list[Any] = list(tensors)
    for layout, total in zip(layouts, sum_buffers([_joined(tensors, each) for each in layouts]), strict=True):
        sizes = [stop - start for start, stop in itertools.pairwise(layout.bounds)]
        for index, part in zip(layout.indices, split(total, sizes), strict=True):
            sums[index] = tf.cast(tf.reshape(part, tensors[index].shape), tensors[index].dtype)
    return sums


def _joined(tensors: Sequence[tf.Tensor], layout: fusion.BufferLayout) -> tf.Tensor:
    members = [tf.reshape(tf.cast(tensors[index], layout.dtype), [-1]) for index in layout.indices]
    return members[0] if len(members) == 1 else tf.concat(members, 0)
