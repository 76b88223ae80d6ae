"""PowerSGD of one rank against the same in NumPy; of several ranks: tests/training/features/."""

import numpy as np
import pytest
import tensorflow as tf

from kdist.engines.single import SingleEngine
from kdist.gradients.power_sgd import PowerSGD
from kdist.gradients.reducer import GradientReducer

GENERATOR = np.random.default_rng(0)
SHAPES = [(12, 10), (10,), (2, 3, 4, 16), (3, 4)]  # of which the second and the last are too small
LOW = (0, 2)


def gradients():
    return [GENERATOR.normal(size=shape).astype("float32") for shape in SHAPES]


@pytest.fixture
def variables():
    return [tf.Variable(tf.zeros(shape)) for shape in SHAPES]


def summed(compression, given, variables, exact=(), bucket_mb=None):
    reducer = GradientReducer(SingleEngine(), compression=compression, bucket_mb=bucket_mb)
    function = tf.function(lambda tensors, others: reducer.sum(tensors, others, variables=variables), autograph=False)
    sums, others = function([tf.constant(each) for each in given], [tf.constant(each) for each in exact])
    return [each.numpy() for each in sums], [each.numpy() for each in others]


def test_it_is_the_algorithm_of_the_paper(variables):
    compression = PowerSGD(2)
    kept = {place: np.zeros((np.prod(SHAPES[place][:-1]), SHAPES[place][-1]), "float64") for place in LOW}
    right = {place: tf.random.stateless_normal([SHAPES[place][-1], 2], [0, 0]).numpy() for place in LOW}
    for _ in range(4):
        given = gradients()
        sums, others = summed(compression, given, variables, exact=[np.float32(3)])
        assert others == [3]
        for place in range(len(SHAPES)):
            if place not in LOW:
                np.testing.assert_array_equal(sums[place], given[place])
                continue
            matrix = given[place].reshape(kept[place].shape) + kept[place]
            left, _ = np.linalg.qr(matrix @ right[place])
            right[place] = matrix.T @ left
            expected = left @ right[place].T
            kept[place] = matrix - expected
            np.testing.assert_allclose(sums[place], expected.reshape(SHAPES[place]), rtol=0, atol=2e-5)


def test_nothing_is_lost_for_good(variables):
    """The same gradient again and again: in the mean, the sums become the gradient."""
    reducer, given = GradientReducer(SingleEngine(), compression=PowerSGD(1)), gradients()

    @tf.function(autograph=False)
    def reduced():
        return reducer.sum([tf.constant(each) for each in given], [], variables=variables)[0]

    reduced()  # its first call may make variables
    total = [np.zeros(shape) for shape in SHAPES]
    for _ in range(200):
        total = [a + b.numpy() for a, b in zip(total, reduced(), strict=True)]
    for each, gradient in zip(total, given, strict=True):
        assert np.linalg.norm(each / 200 - gradient) < 0.1 * np.linalg.norm(gradient)


def test_a_gradient_of_that_rank_is_exact(variables):
    given = gradients()
    given[0] = np.outer(np.arange(12.0), np.arange(10.0)).astype("float32")
    sums, _ = summed(PowerSGD(2), given, variables)
    np.testing.assert_allclose(sums[0], given[0], atol=1e-4)


# Of the second, which is sent as it is, the first has to know; in messages of their own, too.
@pytest.mark.parametrize(("bad", "bucket_mb"), [(0, None), (1, None), (0, 1e-5)])
def test_a_step_that_is_not_finite_leaves_nothing(variables, bad, bucket_mb):
    compression, undisturbed, given = PowerSGD(1), PowerSGD(1), gradients()
    spoilt = [each.copy() for each in given]
    spoilt[bad].flat[3] = np.nan
    summed(compression, given, variables)
    assert np.isnan(summed(compression, spoilt, variables, bucket_mb=bucket_mb)[0][bad]).any()
    summed(undisturbed, given, variables)
    pairs = zip(summed(compression, given, variables)[0], summed(undisturbed, given, variables)[0], strict=True)
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours, theirs)


def test_a_gradient_of_zeros_does_not_end_the_training(variables):
    compression, given = PowerSGD(1), gradients()
    summed(compression, [np.zeros_like(each) for each in given], variables)
    sums, _ = summed(compression, given, variables)
    assert np.linalg.norm(sums[0]) > 0.1 * np.linalg.norm(given[0])


def test_what_was_kept_can_be_forgotten(variables):
    compression, given = PowerSGD(1), gradients()
    first, _ = summed(compression, given, variables)
    second, _ = summed(compression, given, variables)
    compression.load_state_dict(SingleEngine(), {})
    third, _ = summed(compression, given, variables)
    assert not np.array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[0], third[0])


def test_what_was_kept_goes_on_in_another_process(variables):
    """By variable, in whichever order they are met there."""
    compression, given = PowerSGD(1), gradients()
    summed(compression, given, variables)
    state = compression.state_dict(SingleEngine())
    expected, _ = summed(compression, given, variables)
    other = PowerSGD(1)
    other.load_state_dict(SingleEngine(), state)
    found, _ = summed(other, given[::-1], variables[::-1])
    for ours, theirs in zip(found[::-1], expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_bytes():
    compression = PowerSGD(1)
    assert [compression.num_bytes(tf.zeros(shape)) for shape in SHAPES] == [4 * 22, 4 * 10, 4 * (24 + 16), 4 * 12]
    sparse = tf.IndexedSlices(tf.zeros([2, 50]), tf.zeros([2], tf.int64), tf.constant([100, 50]))
    assert compression.num_bytes(sparse) == 4 * 100
    assert compression.num_bytes(tf.zeros([100, 50], tf.bfloat16)) == 4 * 150
