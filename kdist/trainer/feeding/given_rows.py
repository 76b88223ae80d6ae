"""A step's rows: those that a loop of the user's own gives a replica, and rows whose number the graph does not know."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kdist.data.batch import Rows, Shard, batch_signature, int64, zero_row


def given_rows(data: Any, rows: Rows) -> Shard:
    """Returns a replica's rows of a step, and one row of zeros in their place where it has none.

    Layers may not run on no rows: pooling aborts, and batch statistics are NaN.

    Args:
        data: structure of arrays or tensors, as a distributed dataset yields.
        rows: `Rows` of it.

    Returns:
        A `Shard`, whose global rows are not known without a message.
    """
    count = int64(rows.count(data))
    if rows.size:
        return Shard(data, count, ())
    leaves = tf.nest.flatten(data)
    given = [number for number, leaf in enumerate(leaves) if leaf is not None]
    specs = tf.nest.flatten(batch_signature(tf.nest.map_structure(_spec, data)))

    def padding() -> list[Any]:
        return [zero_row(specs[number]) if rows.has_rows(number) else leaves[number] for number in given]

    kept = tf.cond(count > 0, lambda: [leaves[number] for number in given], padding)
    for number, leaf in zip(given, kept, strict=True):
        leaves[number] = leaf
    return Shard(tf.nest.pack_sequence_as(data, leaves), count, ())


def with_unknown_numbers(data: Any) -> Any:
    """Returns data of a graph whose numbers of rows are unknown there.

    Ranks with other numbers of rows then trace the same graph, in which what has rows depends on the data.

    Args:
        data: structure of tensors; eager ones are returned as they are.
    """
    rows = Rows(data)
    leaves = tf.nest.flatten(data)
    hidden = [
        _with_unknown_number(leaf) if rows.probably_has_rows(number) else leaf for number, leaf in enumerate(leaves)
    ]
    return tf.nest.pack_sequence_as(data, hidden)


def _with_unknown_number(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        if not tf.is_symbolic_tensor(leaf.flat_values):
            return leaf
        values = _with_unknown_number(leaf.values)
        if leaf.uniform_row_length is not None:
            return tf.RaggedTensor.from_uniform_row_length(
                values, leaf.uniform_row_length, leaf.nrows(), validate=False
            )
        return tf.RaggedTensor.from_row_splits(values, _with_unknown_number(leaf.row_splits), validate=False)
    if not tf.is_symbolic_tensor(leaf) or not leaf.shape.rank or leaf.shape[0] is None:
        return leaf
    return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape[1:]])


def with_one_row(data: Any) -> Any:
    """Returns data, or its specs, with one row where a graph does not know the number."""
    return tf.nest.map_structure(_with_one_row, data)


def _with_one_row(leaf: Any) -> Any:
    is_dense = isinstance(leaf, tf.TensorSpec) or tf.is_symbolic_tensor(leaf)
    if not is_dense or not leaf.shape.rank or leaf.shape[0] is not None:
        return leaf
    shape = [1, *leaf.shape[1:]]
    return tf.TensorSpec(shape, leaf.dtype) if isinstance(leaf, tf.TensorSpec) else tf.ensure_shape(leaf, shape)


def _spec(leaf: Any) -> Any:
    if leaf is None:
        return None
    is_composite = isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor))
    return tf.type_spec_from_value(leaf if is_composite else tf.convert_to_tensor(leaf))
