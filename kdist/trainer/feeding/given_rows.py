"""The rows that a replica is given by a loop of the user's own, in `strategy.run(model.train_step, ...)`."""

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


def _spec(leaf: Any) -> Any:
    if leaf is None:
        return None
    is_composite = isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor))
    return tf.type_spec_from_value(leaf if is_composite else tf.convert_to_tensor(leaf))
