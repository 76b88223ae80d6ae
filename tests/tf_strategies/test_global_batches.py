"""N consecutive batches as one, for strategies of TensorFlow's own."""

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from kdist.tf_strategies.global_batches import global_dataset


class Pair(NamedTuple):
    x: tf.Tensor
    y: tf.Tensor


def rows_of(width):
    return tf.data.Dataset.range(12).map(lambda n: (tf.fill([width(n)], n), tf.fill([2], n)))


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_batches_of_several_widths_stay_dense_and_whole(drop_remainder):
    """A static number of rows is that of a batch of the user's, not of the merged one."""
    data = rows_of(lambda n: n + 1).padded_batch(3, ([None], [None]), drop_remainder=drop_remainder)
    merged = list(global_dataset(data, 2))
    assert [x.shape for x, _ in merged] == [(6, 6), (6, 12)]
    for number, (x, y) in enumerate(merged):
        np.testing.assert_array_equal(y, np.repeat(np.arange(6) + 6 * number, 2).reshape(6, 2))
        np.testing.assert_array_equal(tf.reduce_max(x, 1), np.arange(6) + 6 * number)


def test_a_named_tuple_stays_one():
    merged = global_dataset(rows_of(lambda n: 3).map(Pair).batch(4), 2)
    assert isinstance(merged.element_spec, Pair)
    assert [len(pair.x) for pair in merged] == [8, 4]
