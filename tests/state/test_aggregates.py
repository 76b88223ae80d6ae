"""The sums and means over rows of which a number of a graph is computed."""

import numpy as np
import pytest
import tensorflow as tf

from kdist.state.graphs.rank_dependence import computed_of
from kdist.state.graphs.recomputed import Recomputed
from kdist.state.rows.aggregates import Aggregates
from kdist.state.rows.means_and_sums import MeansAndSums

ROWS = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")


def found(compute):
    """Returns the kinds of what a number is computed of, and the number, and it computed again, of the same values."""
    kinds = []

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((None, 3))])
    def run(x):
        def depends_on_rows(tensor):
            return any(each.name == x.name for each in computed_of([tensor]))

        rows = MeansAndSums([x], [0], depends_on_rows)
        value = compute(x)
        aggregates = Aggregates(value, rows, [], [])
        recomputed = Recomputed(aggregates.is_changed)
        for each in aggregates.listed:
            kinds.append(each.kind if each.count is None else "chosen")
            recomputed.values[each.tensor.name] = recomputed(each.tensor) * 1
        return value, recomputed(value)

    once, again = run(ROWS)
    np.testing.assert_allclose(again, once, rtol=1e-6)
    return kinds


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda x: tf.sqrt(tf.reduce_mean(x**2)), ["mean"]),
        (lambda x: tf.exp(tf.reduce_sum(x, axis=0))[1], ["sum"]),
        (lambda x: tf.reduce_sum(x * tf.abs(x)) / tf.reduce_sum(tf.abs(x)), ["sum", "sum"]),
        (lambda x: tf.reduce_mean((x - tf.reduce_mean(x, axis=0)) ** 2), ["mean", "mean"]),
        (lambda x: tf.reduce_mean(tf.boolean_mask(x, x[:, 0] > 0)), ["chosen"]),
        (lambda x: tf.reduce_sum(x) / tf.maximum(1.0, tf.reduce_sum(tf.cast(x > 1e6, x.dtype))), ["sum", "sum"]),
        (lambda x: tf.reduce_sum(tf.matmul(x, x, transpose_a=True) ** 2), ["sum"]),
        (lambda x: tf.reduce_sum(x) ** 2 / tf.cast(tf.shape(x)[0], x.dtype), ["sum", "sum"]),
    ],
)
def test_what_a_number_is_computed_of(compute, expected):
    assert found(compute) == expected


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: tf.reduce_sum(x),
        lambda x: tf.reduce_mean(x),
        lambda x: tf.sqrt(tf.reduce_max(x**2)),
        lambda x: tf.reduce_mean(tf.nn.log_softmax(tf.matmul(x, x, transpose_b=True))),
        lambda x: tf.reduce_sum(tf.gather(x, tf.argmax(x[:, 0]))) ** 2,
        lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reduce_sum(x), lambda: tf.reduce_mean(x)),
        lambda x: tf.reduce_sum(x * x[:1]) ** 2,
    ],
)
def test_a_mean_a_sum_and_what_relates_rows_otherwise_are_not_computed_again(compute):
    with pytest.raises(LookupError):
        found(compute)
