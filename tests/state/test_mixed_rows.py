"""Whether outputs of a network depend on other rows than their own, and which operation makes them do so."""

import pytest
import tensorflow as tf

from kdist.state.graphs.rank_dependence import computed_of
from kdist.state.rows.means_and_sums import MeansAndSums
from kdist.state.rows.mixed_rows import first_mixed

tf.config.set_visible_devices([], "GPU")

FOUND = {
    "each row": (lambda x: tf.tanh(x @ tf.ones((3, 3))), None),
    "the data themselves": (lambda x: x, None),
    "a mean over columns": (lambda x: x - tf.reduce_mean(x, -1, keepdims=True), None),
    "a mean over rows": (lambda x: x - tf.reduce_mean(x, 0), "Mean"),
    "the largest element": (lambda x: x / tf.reduce_max(tf.abs(x)), "Max"),
    "a mean that has no effect": (lambda x: x + 0 * tf.reduce_mean(x), None),
    "the other rows": (lambda x: x[:, None] - x[None], "StridedSlice"),
    "the rows turned": (lambda x: x + tf.reverse(x, [0]), "ReverseV2"),
    "the rows before": (lambda x: tf.cumsum(x), "Cumsum"),
    "the rows after": (lambda x: tf.roll(x, 1, 0), "Roll"),
    "a row": (lambda x: x * tf.gather(x, [1]), "GatherV2"),
    "products of rows": (lambda x: tf.einsum("ij,kj->ik", x, x), "Einsum"),
    "products of columns": (lambda x: tf.einsum("ij,ik->ijk", x, x), None),
    "a table of all rows": (lambda x: x @ tf.matmul(x, x, transpose_a=True), "MatMul"),
    "what is drawn": (lambda x: x * tf.random.uniform(tf.shape(x)) - tf.reduce_mean(x, 0), "Mean"),
    "what Python computes": (lambda x: tf.numpy_function(lambda a: a - a.mean(0), [x], tf.float32), None),
}


@pytest.mark.parametrize("length", [None, 4])
@pytest.mark.parametrize("name", FOUND)
def test_which_operation_mixes_rows(name, length):
    compute, expected = FOUND[name]
    found = []

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((length, 3))])
    def run(x):
        def depends_on_rows(tensor):
            return any(each.name == x.name for each in [tensor, *computed_of([tensor])])

        outputs = compute(x)
        mixed = first_mixed(MeansAndSums([x], [0], depends_on_rows), [outputs], [])
        found.append(None if mixed is None else mixed.type)
        return outputs

    run.get_concrete_function()
    assert found == [expected]
