"""What one rank gets at one step, and how a batch is cut into rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class Shard(NamedTuple):
    """One rank's part of one step.

    Attributes:
        data: the user's structure (`x`, `(x, y)`, `(x, y, sample_weight)`, ...) with this rank's rows.
        rows: `int64` scalar, the number of this rank's rows that count. It is 0 on a rank without data in
            this step, which then carries one row that does not count.
        global_rows: `int64` scalar, the rows of all ranks in this step that count; -1 if a rank cannot know
            it without asking the others.
    """

    data: Any
    rows: Any
    global_rows: Any


def int64(value: Any) -> Any:
    """Returns `value` as an `int64` tensor."""
    return tf.cast(value, tf.int64)


def row_leaves(data: Any) -> list[Any]:
    """Returns the leaves of a structure of arrays, tensors or specs that have rows."""
    leaves = tf.nest.flatten(data)
    return [leaf for leaf in leaves if getattr(leaf, "shape", None) is not None and not _is_scalar(leaf)]


def _is_scalar(leaf: Any) -> bool:
    shape = leaf.shape
    return (shape.rank if isinstance(shape, tf.TensorShape) else len(shape)) == 0


def count_rows(data: Any) -> Any:
    """Returns the number of rows of a batch, an `int64` scalar tensor.

    Args:
        data: structure of dense, sparse or ragged tensors that share their first dimension.

    Returns:
        The size of that dimension; 1 if there is none.
    """
    for leaf in row_leaves(data):
        if isinstance(leaf, tf.SparseTensor):
            return int64(leaf.dense_shape[0])
        if isinstance(leaf, tf.RaggedTensor):
            return int64(leaf.nrows())
        return tf.shape(leaf, out_type=tf.int64)[0]
    return tf.constant(1, tf.int64)


def slice_rows(data: Any, start: Any, stop: Any) -> Any:
    """Returns the rows `start:stop` of a batch.

    Args:
        data: structure of arrays or tensors that share their first dimension; `None` and scalars are kept.
        start: int or `int64` scalar tensor.
        stop: int or `int64` scalar tensor.

    Returns:
        The same structure with `stop - start` rows.
    """

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            rest = leaf.dense_shape[1:]
            begin = tf.concat([int64([start]), tf.zeros_like(rest)], 0)
            return tf.sparse.slice(leaf, begin, tf.concat([int64([stop - start]), rest], 0))
        if getattr(leaf, "shape", None) is None or _is_scalar(leaf):
            return leaf
        return leaf[start:stop]

    return tf.nest.map_structure(cut, data)


def split_batch(data: Any, num_shards: int, shard_id: Any) -> Shard:
    """Returns a shard's near-equal slice of the rows of a batch.

    Args:
        data: structure of tensors that share their first dimension.
        num_shards: int, the number of slices.
        shard_id: int or `int64` scalar tensor, which slice.

    Returns:
        A `Shard`; where the slice is empty, it carries the batch's first row.
    """
    total = count_rows(data)
    start = total * int64(shard_id) // num_shards
    rows = total * (int64(shard_id) + 1) // num_shards - start
    start = tf.where(rows > 0, start, 0)
    return Shard(slice_rows(data, start, start + tf.maximum(rows, 1)), rows, total)


def batch_signature(spec: Any) -> Any:
    """Returns a structure of tensor specs with an unknown batch dimension."""

    def relax(leaf: Any) -> Any:
        shape = getattr(leaf, "shape", None)
        if shape is None or shape.rank in (None, 0):
            return leaf
        shape = tf.TensorShape([None]).concatenate(shape[1:])
        if isinstance(leaf, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits_dtype)
        if isinstance(leaf, tf.SparseTensorSpec):
            return tf.SparseTensorSpec(shape, leaf.dtype)
        return tf.TensorSpec(shape, leaf.dtype) if isinstance(leaf, tf.TensorSpec) else leaf

    return tf.nest.map_structure(relax, spec)


def lists_to_tuples(structure: Any) -> Any:
    """Returns a structure with its lists made tuples: `tf.data` takes a list for a tensor."""
    if isinstance(structure, list | tuple) and not hasattr(structure, "_fields"):
        return tuple(lists_to_tuples(item) for item in structure)
    if isinstance(structure, dict):
        return {key: lists_to_tuples(value) for key, value in structure.items()}
    return structure


def blank_row(spec: Any) -> Any:
    """Returns one row of zeros (of empty strings) that fits a structure of tensor specs."""

    def blank(leaf: Any) -> Any:
        if isinstance(leaf, tf.RaggedTensorSpec):
            values = tf.zeros([0, *_known(leaf.shape[leaf.ragged_rank + 1 :])], leaf.dtype)
            for depth in reversed(range(leaf.ragged_rank)):
                splits = tf.constant([0, 0] if depth == 0 else [0], leaf.row_splits_dtype)
                values = tf.RaggedTensor.from_row_splits(values, splits)
            return values
        if isinstance(leaf, tf.SparseTensorSpec):
            shape = [1, *_known(leaf.shape[1:])]
            return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], leaf.dtype), shape)
        if isinstance(leaf, tf.TensorSpec):
            shape = leaf.shape if leaf.shape.rank is not None else tf.TensorShape([None])
            return tf.zeros([1, *_known(shape[1:])] if shape.rank else [], leaf.dtype)
        return None

    return tf.nest.map_structure(blank, spec)


def _known(shape: Any) -> list[int]:
    return [1 if size is None else size for size in shape]
