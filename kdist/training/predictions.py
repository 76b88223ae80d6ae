"""All ranks' predictions, in the order of the rows, whatever a model puts out: arrays, text, ragged tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.engines.engine import Engine


def gather_rows(
    engine: Engine, output: tf.Tensor | tf.RaggedTensor, rows: tf.Tensor, *, widths_differ: bool
) -> tf.Tensor | tf.RaggedTensor:
    """Concatenates the ranks' rows of one output.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks talk to each other.
        output: tensor or `tf.RaggedTensor`, what the model puts out for this rank's rows, of any length.
        rows: `int64` scalar, how many of this rank's rows count: all, or none.
        widths_differ: bool, whether the dimensions besides the first may differ between the ranks, as those of their
            batches do. The result of a tensor is then ragged in all of them, until `restored` sees in which they do.
            So it is where the model decides them: a graph's static shape leaves them open.
    """
    if not isinstance(output, tf.RaggedTensor):
        output = tf.convert_to_tensor(output)
    mine = output[: tf.where(rows > 0, tf.int32.max, 0)]
    if not isinstance(mine, tf.RaggedTensor) and mine.shape.rank is not None:
        is_graph = not tf.executing_eagerly()
        axes = range(1, mine.shape.rank)
        open_axes = [axis for axis in axes if widths_differ or (is_graph and mine.shape[axis] is None)]
        if open_axes:
            mine = tf.RaggedTensor.from_tensor(mine, ragged_rank=open_axes[-1])
    if not isinstance(mine, tf.RaggedTensor):
        return _gather_values(engine, mine)
    lengths = engine.allgather(mine.nested_row_lengths())
    return tf.RaggedTensor.from_nested_row_lengths(_gather_values(engine, mine.flat_values), lengths)


def restored(predictions: Any, was_dense: Sequence[bool]) -> Any:
    """Returns predictions with those ragged ones that were dense as arrays, or ragged only where rows do differ.

    Args:
        predictions: structure of arrays and `tf.RaggedTensor`.
        was_dense: sequence of bool, for each leaf whether the model's own output was dense.
    """
    leaves = [
        _least_ragged(leaf) if dense and isinstance(leaf, tf.RaggedTensor) else leaf
        for leaf, dense in zip(keras.tree.flatten(predictions), was_dense, strict=True)
    ]
    return keras.tree.pack_sequence_as(predictions, leaves)


def _least_ragged(ragged: tf.RaggedTensor) -> Any:
    """Makes the inner dimensions in which nothing differs plain ones, as `predict` of one process does."""
    values = ragged.flat_values.numpy()
    lengths = [level.numpy() for level in ragged.nested_row_lengths()]
    while lengths and (lengths[-1] == lengths[-1][:1]).all():
        width = lengths[-1][0] if len(lengths[-1]) else 0
        values = values.reshape(len(lengths.pop()), width, *values.shape[1:])
    return tf.RaggedTensor.from_nested_row_lengths(values, lengths) if lengths else values


def _gather_values(engine: Engine, values: tf.Tensor) -> tf.Tensor:
    return _gather_texts(engine, values) if values.dtype == tf.string else engine.allgather([values])[0]


def _gather_texts(engine: Engine, texts: tf.Tensor) -> tf.Tensor:
    """Sends texts as their bytes and lengths: engines know numbers only."""
    flat = tf.reshape(texts, [-1])
    letters, lengths, rows = engine.allgather(
        [tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8), tf.strings.length(flat), tf.shape(texts)[:1]]
    )
    joined = tf.strings.reduce_join(tf.gather([bytes([code]) for code in range(256)], tf.cast(letters, tf.int32)))
    everyone = tf.strings.substr(joined, tf.cumsum(lengths, exclusive=True), lengths)
    return tf.reshape(everyone, tf.concat([[tf.reduce_sum(rows)], tf.shape(texts)[1:]], 0))
