"""The largest numbers alone, of one rank; of several ranks: tests/training/features/."""

import numpy as np
import pytest
import tensorflow as tf

from kdist.engines.single import SingleEngine
from kdist.gradients.reducer import GradientReducer
from kdist.gradients.top_k import TopK

GENERATOR = np.random.default_rng(0)
SHAPES = [(40, 50), (50,)]  # the second is too small


def gradients():
    return [GENERATOR.normal(size=shape).astype("float32") for shape in SHAPES]


@pytest.fixture
def variables():
    return [tf.Variable(tf.zeros(shape)) for shape in SHAPES]


def summed(compression, given, variables):
    reducer = GradientReducer(SingleEngine(), compression=compression)
    function = tf.function(
        lambda tensors: reducer.sum(tensors, [tf.constant(3.0)], variables=variables), autograph=False
    )
    sums, (other,) = function([tf.constant(each) for each in given])
    assert other == 3
    return [each.numpy() for each in sums]


def test_the_largest_are_sent_and_the_others_kept(variables):
    compression = TopK(0.05)
    kept = np.zeros(SHAPES[0], "float32")
    for _ in range(4):
        given = gradients()
        sums = summed(compression, given, variables)
        np.testing.assert_array_equal(sums[1], given[1])
        full = given[0] + kept
        expected = np.where(np.abs(full) >= np.sort(np.abs(full).ravel())[-100], full, 0)
        np.testing.assert_array_equal(sums[0], expected)
        kept = full - expected


def test_there_may_be_no_gradient():
    """Of a model of embedding tables in parts alone."""
    assert summed(TopK(0.05), [], []) == []


def test_with_all_of_them_sums_are_exact(variables):
    given = gradients()
    for ours, theirs in zip(summed(TopK(1.0), given, variables), given, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_leaves_nothing(variables, bad):
    compression, undisturbed, given = TopK(0.05), TopK(0.05), gradients()
    spoilt = [each.copy() for each in given]
    spoilt[0][3, 4] = bad
    summed(compression, given, variables)
    assert np.isnan(summed(compression, spoilt, variables)[0]).any()
    summed(undisturbed, given, variables)
    np.testing.assert_array_equal(summed(compression, given, variables)[0], summed(undisturbed, given, variables)[0])


def test_what_was_kept_can_be_forgotten(variables):
    compression, given = TopK(0.05), gradients()
    first, second = summed(compression, given, variables)[0], summed(compression, given, variables)[0]
    compression.load_state_dict(SingleEngine(), {})
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, summed(compression, given, variables)[0])


def test_bytes():
    assert [TopK(0.01).num_bytes(tf.zeros(shape)) for shape in SHAPES] == [20 * 8, 4 * 50]
    assert TopK(0.01).num_bytes(tf.zeros([40, 50], tf.bfloat16)) == 20 * 8
