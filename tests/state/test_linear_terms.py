"""The terms of a scalar of a graph, with their weights."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from kdist.state.graphs.linear_terms import linear_terms

GIVEN = {"a": 2.0, "b": 3.0, "rate": 0.5}


def built(compute):
    """Returns the value of what is computed of three scalars, and that of its terms times their weights, by name."""
    found = collections.Counter()

    @tf.function(autograph=False)
    def run(a, b, rate):
        own = {"a": tf.identity(a * a, "first"), "b": tf.identity(tf.exp(b), "second"), "rate": rate}
        value = compute(**own)
        names = {each.name: name for name, each in own.items()}
        terms = linear_terms(value, lambda each: each.name in names)
        found.update(names.get(term.name, "other") for term, _ in terms)
        total = tf.add_n([term * tf.cast(weight, term.dtype) for term, weight in terms])
        return value, total

    value, total = run(**{name: tf.constant(each) for name, each in GIVEN.items()})
    return float(value), float(total), found


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda a, b, rate: a, {"a"}),
        (lambda a, b, rate: a + b, {"a", "b"}),
        (lambda a, b, rate: 2 * a - b / 4, {"a", "b"}),
        (lambda a, b, rate: -(0.3 * (a + 3 * b) + a), {"a", "b"}),
        (lambda a, b, rate: rate * a - b, {"other", "b"}),
        (lambda a, b, rate: tf.add_n([a, a, b]), {"a", "b"}),
        (lambda a, b, rate: tf.reduce_sum(tf.stack([a, b, a])), {"a", "b"}),
        (lambda a, b, rate: tf.reduce_mean(tf.reduce_sum(a)) + b, {"a", "b"}),
        (lambda a, b, rate: tf.cast(tf.cast(a, tf.float64) * 3, tf.float32) + b / 7, {"a", "b"}),
        (lambda a, b, rate: tf.sqrt(a) + a * b, {"other"}),
    ],
)
def test_terms_and_weights(compute, expected):
    value, total, found = built(compute)
    np.testing.assert_allclose(total, value, rtol=1e-6)
    assert set(found) == expected
    assert all(count == 1 for name, count in found.items() if name != "other")


def test_terms_of_a_tensor_that_is_used_often_are_found_once():
    with tf.Graph().as_default():  # which is not run: TensorFlow's optimizer would follow each way
        first = value = tf.compat.v1.placeholder(tf.float32, ())
        for _ in range(60):  # 2**60 ways to it
            value = value + value
        ((term, weight),) = linear_terms(value, lambda each: False)
    assert term.name == first.name
    assert weight == 2.0**60
