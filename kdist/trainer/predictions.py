"""All ranks' predictions in the order of the rows: arrays, strings, ragged and sparse tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.engines.engine import Engine


def gather_rows(
    engine: Engine, output: tf.Tensor | tf.RaggedTensor | tf.SparseTensor, rows: tf.Tensor, *, widths_differ: bool
) -> tf.Tensor | tf.RaggedTensor | tf.SparseTensor:
    """Concatenates the ranks' rows of one output.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks communicate.
        output: tensor, `tf.RaggedTensor` or `tf.SparseTensor`, the model's output for this rank's rows.
        rows: `int64` scalar, the number of this rank's rows; 0 for a rank without data, whose output is dropped.
        widths_differ: bool, whether dimensions after the first may differ between the ranks, as in their batches. The
            result is then ragged in these, and in dimensions that are unknown in a graph; see `as_dense`.
    """
    if isinstance(output, tf.SparseTensor):
        return _gather_sparse(engine, output, rows)
    if not isinstance(output, tf.RaggedTensor):
        output = tf.convert_to_tensor(output)
    local = output[: tf.where(rows > 0, tf.int32.max, 0)]
    if not isinstance(local, tf.RaggedTensor) and local.shape.rank is not None:
        is_graph = not tf.executing_eagerly()
        axes = range(1, local.shape.rank)
        open_axes = [axis for axis in axes if widths_differ or (is_graph and local.shape[axis] is None)]
        if open_axes:
            local = tf.RaggedTensor.from_tensor(local, ragged_rank=open_axes[-1])
    if not isinstance(local, tf.RaggedTensor):
        return _gather_values(engine, local)
    lengths = engine.allgather(local.nested_row_lengths())
    return tf.RaggedTensor.from_nested_row_lengths(_gather_values(engine, local.flat_values), lengths)


def as_dense(predictions: Any, was_dense: Sequence[bool]) -> Any:
    """Returns predictions without ragged dimensions in which the rows do not differ.

    Args:
        predictions: structure of arrays and `tf.RaggedTensor`.
        was_dense: sequence of bool, for each leaf whether the model's output was dense. Others are not changed.
    """
    leaves = [
        _densified(leaf) if dense and isinstance(leaf, tf.RaggedTensor) else leaf
        for leaf, dense in zip(keras.tree.flatten(predictions), was_dense, strict=True)
    ]
    return keras.tree.pack_sequence_as(predictions, leaves)


def _densified(ragged: tf.RaggedTensor) -> Any:
    """Makes inner dimensions uniform in which the rows do not differ."""
    values = ragged.flat_values.numpy()
    lengths = [level.numpy() for level in ragged.nested_row_lengths()]
    while lengths and (lengths[-1] == lengths[-1][:1]).all():
        width = lengths[-1][0] if len(lengths[-1]) else 0
        values = values.reshape(len(lengths.pop()), width, *values.shape[1:])
    return tf.RaggedTensor.from_nested_row_lengths(values, lengths) if lengths else values


def _gather_sparse(engine: Engine, output: tf.SparseTensor, rows: tf.Tensor) -> tf.SparseTensor:
    own = tf.where(rows > 0, output.dense_shape[0], 0)
    (shapes,) = engine.allgather([tf.concat([[own], output.dense_shape[1:]], 0)[tf.newaxis]])
    first = tf.reduce_sum(shapes[: engine.rank, 0])  # the rows of the ranks before
    is_own = output.indices[:, 0] < own
    indices = tf.boolean_mask(output.indices, is_own)
    (indices,) = engine.allgather([tf.concat([indices[:, :1] + first, indices[:, 1:]], 1)])
    shape = tf.concat([tf.reduce_sum(shapes[:, :1], 0), tf.reduce_max(shapes[:, 1:], 0)], 0)
    return tf.SparseTensor(indices, _gather_values(engine, tf.boolean_mask(output.values, is_own)), shape)


def _gather_values(engine: Engine, values: tf.Tensor) -> tf.Tensor:
    return _gather_strings(engine, values) if values.dtype == tf.string else engine.allgather([values])[0]


def _gather_strings(engine: Engine, strings: tf.Tensor) -> tf.Tensor:
    """Sends strings as bytes and lengths: engines send numbers only."""
    flat = tf.reshape(strings, [-1])
    letters, lengths, rows = engine.allgather(
        [tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8), tf.strings.length(flat), tf.shape(strings)[:1]]
    )
    joined = tf.strings.reduce_join(tf.gather([bytes([code]) for code in range(256)], tf.cast(letters, tf.int32)))
    gathered = tf.strings.substr(joined, tf.cumsum(lengths, exclusive=True), lengths)
    return tf.reshape(gathered, tf.concat([[tf.reduce_sum(rows)], tf.shape(strings)[1:]], 0))
