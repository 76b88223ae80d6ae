"""Tensors of numbers, `bool` and strings, gathered over the ranks: engines send numbers only."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from kdist.engines.engine import Engine


def values_of_all_ranks(engine: Engine, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Concatenates tensors over the ranks along their first axis, in one message; strings travel as bytes and lengths.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks communicate.
        tensors: sequence of tensors of rank at least 1; only their first dimensions may differ between the ranks.

    Returns:
        A list of tensors, equal on all ranks.
    """
    sent: list[tf.Tensor] = []
    for tensor in tensors:
        if tensor.dtype == tf.string:
            flat = tf.reshape(tensor, [-1])
            sent += [tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8), tf.strings.length(flat)]
            sent.append(tf.shape(tensor)[:1])
        else:
            sent.append(tensor)
    gathered = iter(engine.allgather(sent))
    return [
        _strings(tensor, next(gathered), next(gathered), next(gathered))
        if tensor.dtype == tf.string
        else next(gathered)
        for tensor in tensors
    ]


def _strings(like: tf.Tensor, letters: tf.Tensor, lengths: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    joined = tf.strings.reduce_join(tf.gather([bytes([code]) for code in range(256)], tf.cast(letters, tf.int32)))
    gathered = tf.strings.substr(joined, tf.cumsum(lengths, exclusive=True), lengths)
    return tf.reshape(gathered, tf.concat([[tf.reduce_sum(rows)], tf.shape(like)[1:]], 0))
