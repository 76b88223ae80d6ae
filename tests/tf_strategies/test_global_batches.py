"""N consecutive batches as one, for strategies of TensorFlow's own."""

from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.tf_strategies.global_batches import GlobalPyDataset, global_dataset, with_global_batches


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


class Texts(keras.utils.PyDataset):
    def __init__(self, as_they_are):
        super().__init__()
        self.as_they_are = as_they_are

    def __len__(self):
        return 3

    def __getitem__(self, index):
        batch = np.full((2, 1 + index, 3), 1.0 + index, "float32"), np.full((2, 2 - index // 2), "a"), np.full(2, index)
        return batch if self.as_they_are else tuple(map(tf.constant, batch))


@pytest.mark.parametrize("convert", [np.asarray, tf.constant])
@pytest.mark.parametrize("other", [(2, 4, 4, 1), (2, 4)])
def test_features_are_not_padded(convert, other):
    images = [convert(np.zeros((2, 4, 4, 3))), convert(np.zeros(other))]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="[dD]imension|Ranks of all input"):
        list(with_global_batches({"x": iter(images)}, 2)["x"])


@pytest.mark.parametrize("as_they_are", [True, False])
@pytest.mark.parametrize("of_generator", [True, False])
def test_batches_of_a_py_dataset_or_a_generator_are_padded_to_the_widest(as_they_are, of_generator):
    texts = Texts(as_they_are)
    merged = GlobalPyDataset(texts, 3)
    if of_generator:
        merged = list(with_global_batches({"x": (texts[index] for index in range(3))}, 3)["x"])
    numbers, words, rows = merged[0]
    assert numbers.dtype == np.float32
    expected = [[[1, 0, 0]] * 2, [[2, 2, 0]] * 2, [[3, 3, 3]] * 2]
    np.testing.assert_array_equal(np.asarray(numbers)[..., 1], np.concatenate(expected))
    assert np.asarray(words).astype("U").tolist() == [["a", "a"]] * 4 + [["a", ""]] * 2
    np.testing.assert_array_equal(rows, [0, 0, 1, 1, 2, 2])
