"""The initial values of some rows of a table: those of one process, without the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kdist.keras_hooks.random_seeds import drawn_seed
from kdist.sharding.table import num_rows

_BLOCK = 1 << 18  # numbers that are made at a time
_SHOWN = 8  # numbers that tell tables apart; hosts may round otherwise
_GROUP = 4  # numbers of `float32` that TensorFlow's generator makes at a time
_CUT_OFF = 0.87962566103423978  # standard deviation of normal numbers that are cut off at 2


class _Numbers(NamedTuple):
    """How `float32` numbers are drawn: those of `draw`, times a factor, and a term.

    Attributes:
        draw: TensorFlow's operation.
        states: int, by how many the counter grows with each group of numbers; some groups are drawn again.
        factor, term: `float32` scalars.
    """

    draw: Callable[..., Any]
    states: int
    factor: Any
    term: Any


def initial_rows(initializer: Any, shape: tuple[int, int], dtype: str, size: int, rank: int) -> tuple[Any, Any]:
    """Returns the rows `r` with `r % size == rank` of what an initializer makes of a shape, and a sign of all rows.

    Zeros, ones, and Keras' random `float32` numbers are made a block at a time, but for orthogonal ones. All others are
    made whole, and the rest is given back.

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
    numbers = _numbers(initializer, shape) if dtype == "float32" else None
    if numbers is not None:
        seed = drawn_seed(initializer.seed)
        return tf.concat(list(_drawn(numbers, seed, shape, size, rank)), axis=0), seed.numpy().tolist()
    whole = keras.ops.convert_to_tensor(initializer(shape, dtype=dtype), dtype)
    step = max(1, shape[0] * shape[1] // _SHOWN)
    shown = tf.cast(tf.reshape(whole, [-1])[::step], tf.float64).numpy()
    return tf.identity(whole[rank::size]), [f"{each:.2e}" for each in shown]


def _numbers(initializer: Any, shape: tuple[int, int]) -> _Numbers | None:
    """Returns how an initializer draws numbers for a shape; `None` for one that is not known."""
    kinds, call = keras.initializers, type(initializer).__call__
    if call is kinds.RandomUniform.__call__:
        return _uniform(initializer.minval, initializer.maxval)
    if call is kinds.RandomNormal.__call__:
        return _normal(initializer.stddev, initializer.mean)
    if call is kinds.TruncatedNormal.__call__:
        return _truncated(initializer.stddev, initializer.mean)
    if call is not kinds.VarianceScaling.__call__ or getattr(initializer, "input_axes", None) is not None:
        return None
    fans = {"fan_in": shape[0], "fan_out": shape[1]}
    scale = initializer.scale / max(1.0, fans.get(initializer.mode, sum(shape) / 2.0))
    if initializer.distribution == "uniform":
        limit = math.sqrt(3.0 * scale)
        return _uniform(-limit, limit)
    deviation = math.sqrt(scale)
    is_cut_off = initializer.distribution == "truncated_normal"
    return _truncated(deviation / _CUT_OFF, 0.0) if is_cut_off else _normal(deviation, 0.0)


def _uniform(low: Any, high: Any) -> _Numbers:
    low, high = (tf.cast(each, tf.float32) for each in (low, high))
    return _Numbers(tf.raw_ops.StatelessRandomUniformV2, 1, high - low, low)


def _normal(deviation: Any, mean: Any) -> _Numbers:
    return _Numbers(tf.raw_ops.StatelessRandomNormalV2, 1, tf.cast(deviation, tf.float32), tf.cast(mean, tf.float32))


def _truncated(deviation: Any, mean: Any) -> _Numbers:
    return _normal(deviation, mean)._replace(draw=tf.raw_ops.StatelessTruncatedNormalV2, states=256)


def _drawn(numbers: _Numbers, seed: tf.Tensor, shape: tuple[int, int], size: int, rank: int) -> Iterator[Any]:
    number, width = shape
    found = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    algorithm = tf.raw_ops.StatelessRandomGetAlg()
    step = max(1, _BLOCK // width // (_GROUP * size)) * _GROUP * size  # rows: a block begins a group, at rank 0's row
    for start in range(0, number, step):
        states = start * width // _GROUP * numbers.states
        counter = found.counter + tf.stack([tf.constant(states, tf.uint64), tf.constant(0, tf.uint64)])
        values = numbers.draw(
            shape=[min(step, number - start), width], key=found.key, counter=counter, alg=algorithm, dtype=tf.float32
        )
        yield values[rank::size] * numbers.factor + numbers.term
