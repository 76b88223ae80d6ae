"""The rows of which a graph computes a number that relates them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from kdist.state.graphs.rank_dependence import computed_of
from kdist.state.graphs.recomputed import Recomputed
from kdist.state.rows.means_and_sums import MeansAndSums
from kdist.state.rows.row_frontier import RowFrontier
from kdist.state.rows.row_wise import RowWise

ROWS = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
DENSE = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="tanh")])


def found(compute):
    """Returns what a number is computed of; it and its gradient must be the same if they are computed again."""
    kinds = []

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((None, 3))])
    def run(x):
        def depends_on_rows(tensor):
            return any(each.name == x.name or "Random" in each.op.type for each in computed_of([tensor]))

        data = MeansAndSums([x], [0], depends_on_rows)
        value = compute(x)
        cut = RowFrontier([value], RowWise(data), [], [])
        recomputed = Recomputed(cut.is_changed)
        for each in cut.listed:
            kinds.append((each.kind, each.tensor.op.type))
            recomputed.take(each.tensor)
        again = recomputed(value)
        taken = [pair for pair in recomputed.taken if pair[0].dtype.is_floating]
        by_rows = tf.gradients(again, [own for _, own in taken])
        return value, again, tf.gradients(value, x), tf.gradients([each for each, _ in taken], x, grad_ys=by_rows)

    once, again, gradient, through_rows = run(ROWS)
    np.testing.assert_allclose(again, once, rtol=1e-6)
    for one, other in zip(gradient, through_rows, strict=True):
        np.testing.assert_allclose(*map(tf.convert_to_tensor, (other, one)), rtol=1e-5, atol=1e-7)
    return sorted(kinds)


def of_numbers(x):
    logits = tf.matmul(DENSE(x), DENSE(x), transpose_b=True)
    return ops.mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(x)[0]), logits))


def by_a_count_of_none(x):
    """The number is 0 for all made-up rows, which would hide what it relates."""
    return ops.mean((x - 1) ** 2 * ops.sum(ops.cast(x > 1e5, "float32"))) + ops.max(x)


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda x: ops.max(DENSE(x)), [("rows", "Tanh")]),
        (lambda x: ops.mean(ops.logsumexp(ops.matmul(DENSE(x), ops.transpose(DENSE(x))))), [("rows", "Tanh")] * 2),
        (of_numbers, [("rows", "Tanh"), ("rows", "Tanh"), ("shape", "Shape")]),
        (lambda x: ops.mean(ops.top_k(ops.sum(x**2, axis=1), 3)[0]), [("rows", "Sum")]),
        (lambda x: tf.sqrt(tf.reduce_sum(DENSE(x)[:4] ** 2)), [("rows", "Tanh")]),
        (lambda x: tf.sqrt(tf.reduce_max(tf.boolean_mask(DENSE(x), x[:, 0] > 0))), [("rows", "GatherV2")]),
        (lambda x: tf.reduce_max(tf.reshape(DENSE(x), (-1, 2))), [("rows", "Reshape")]),
        (
            lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reduce_sum(x) ** 2, lambda: 0.0),
            [("rows", "Placeholder")],
        ),
        (
            lambda x: tf.foldl(lambda most, row: tf.maximum(most, tf.norm(row)), x, tf.zeros(())),
            [("rows", "Placeholder"), ("shape", "Shape")],
        ),
        (by_a_count_of_none, [("rows", "Cast"), ("rows", "Placeholder"), ("rows", "Pow")]),
    ],
)
def test_what_a_number_is_computed_of(compute, expected):
    assert found(compute) == expected


@tf.custom_gradient
def with_own_gradient(x):
    return x, lambda upstream: 2 * upstream


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: ops.max(x) * tf.ensure_shape(tf.numpy_function(np.max, [x], tf.float32), ()),
        lambda x: ops.max(x + ops.max(x) * tf.random.uniform(())),
        lambda x: with_own_gradient(ops.max(x)),
    ],
)
def test_what_cannot_be_computed_again(compute):
    with pytest.raises(LookupError):
        found(compute)


@pytest.mark.parametrize(
    "related",
    [
        lambda x: tf.sort(x[:, 0])[:, None],
        tf.cumsum,
        lambda x: x[:20],
        lambda x: x * tf.cast(tf.range(tf.shape(x)[0])[:, None], x.dtype),
        lambda x: x - tf.reduce_mean(x, axis=0),
        lambda x: tf.nn.softmax(x, axis=0),
        lambda x: tf.reverse(x, [0]),
        lambda x: tf.roll(x, 1, 0),
    ],
)
def test_rows_that_depend_on_others_do_not_count(related):
    assert all(
        operation in ("Placeholder", "Shape", "Neg", "StridedSlice")
        for _, operation in found(lambda x: tf.reduce_max(related(x) ** 2))
    )
