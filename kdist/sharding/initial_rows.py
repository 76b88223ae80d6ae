"""The initial values of some rows of a table: those of one process, without the table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.random_seeds import drawn_seed
from kdist.sharding.table import num_rows

_BLOCK = 1 << 18  # numbers that are made at a time
_SHOWN = 8  # numbers that tell tables apart; hosts may round otherwise
_GROUP = 4  # numbers of `float32` that TensorFlow's generator makes of one state of its counter


def initial_rows(initializer: Any, shape: tuple[int, int], dtype: str, size: int, rank: int) -> tuple[Any, Any]:
    """Returns the rows `r` with `r % size == rank` of what an initializer makes of a shape, and a sign of all rows.

    Zeros, ones, and Keras' uniform and normal `float32` numbers are made a block at a time. All others are made whole,
    and the rest is given back.

    Args:
        initializer: `keras.initializers.Initializer`.
        shape: pair of ints, the number of all rows and their length.
        dtype: str, the dtype of the values.
        size: int, the number of ranks.
        rank: int, this rank.

    Returns:
        A tensor, and JSON values that differ where another table was drawn: the seed, or some numbers, roughly.
    """
    kinds = keras.initializers
    if type(initializer) in (kinds.Zeros, kinds.Ones):
        return initializer((num_rows(shape[0], size, rank), shape[1]), dtype=dtype), None
    if type(initializer) in (kinds.RandomUniform, kinds.RandomNormal) and dtype == "float32":
        seed = drawn_seed(initializer.seed)
        return tf.concat(list(_drawn(initializer, seed, shape, size, rank)), axis=0), seed.numpy().tolist()
    whole = initializer(shape, dtype=dtype)
    step = max(1, shape[0] * shape[1] // _SHOWN)
    shown = tf.cast(tf.reshape(whole, [-1])[::step], tf.float64).numpy()
    return tf.identity(whole[rank::size]), [f"{each:.2e}" for each in shown]


def _drawn(initializer: Any, seed: tf.Tensor, shape: tuple[int, int], size: int, rank: int) -> Iterator[Any]:
    number, width = shape
    is_uniform = isinstance(initializer, keras.initializers.RandomUniform)
    draw = tf.raw_ops.StatelessRandomUniformV2 if is_uniform else tf.raw_ops.StatelessRandomNormalV2
    found = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    algorithm = tf.raw_ops.StatelessRandomGetAlg()
    step = max(1, _BLOCK // width // (_GROUP * size)) * _GROUP * size  # rows: a block begins a group, at rank 0's row
    for start in range(0, number, step):
        rows = min(step, number - start)
        counter = found.counter + tf.stack([tf.constant(start * width // _GROUP, tf.uint64), tf.constant(0, tf.uint64)])
        values = draw(shape=[rows, width], key=found.key, counter=counter, alg=algorithm, dtype=tf.float32)
        values = values[rank::size]
        if is_uniform:
            low, high = (tf.cast(each, tf.float32) for each in (initializer.minval, initializer.maxval))
            yield values * (high - low) + low
        else:
            yield values * tf.cast(initializer.stddev, tf.float32) + tf.cast(initializer.mean, tf.float32)
