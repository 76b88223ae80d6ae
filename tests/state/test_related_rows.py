"""Whether tensors of a step's graph, used together, relate rows: as a compiled loss or a metric is given them."""

import pytest
import tensorflow as tf

from kdist.state.graphs.rank_dependence import computed_of
from kdist.state.rows.means_and_sums import MeansAndSums
from kdist.state.rows.row_wise import RowWise

tf.config.set_visible_devices([], "GPU")

FOUND = {
    "each row": (lambda x, y: (y, tf.tanh(x)), False),
    "the data themselves": (lambda x, y: (y, x), False),
    "rows twice": (lambda x, y: (tf.concat([y, 2 * y], 0), tf.concat([x, 2 * x], 0)), False),
    "rows turned together": (lambda x, y: (y[::-1], x[::-1]), False),
    "rows turned": (lambda x, y: (y, x[::-1]), True),
    "targets beside a difference from a mean": (lambda x, y: (y, x - tf.reduce_mean(x, 0)), True),
    "pairs": (lambda x, y: (tf.range(tf.shape(x)[0]), x @ tf.transpose(x)), True),
    "places": (lambda x, y: (tf.range(tf.shape(x)[0]), x), True),
    "the largest of several": (lambda x, y: (tf.math.top_k(x @ tf.transpose(x), 3)[0],), True),
    "a table of all rows": (lambda x, y: (tf.eye(3), tf.transpose(x) @ y / 6), True),
    "what Python computes": (lambda x, y: (tf.numpy_function(lambda a: a @ a.T, [x], tf.float32),), False),
}


@pytest.mark.parametrize("name", FOUND)
def test_whether_tensors_relate_rows(name):
    compute, expected = FOUND[name]
    found = []

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((None, 3))] * 2)
    def run(x, y):
        names = {x.name, y.name}

        def depends_on_rows(tensor):
            return any(each.name in names for each in [tensor, *computed_of([tensor])])

        tensors = compute(x, y)
        found.append(RowWise(MeansAndSums([x, y], [0, 1], depends_on_rows)).relates(tensors, [], []))
        return tensors

    run.get_concrete_function()
    assert found == [expected]
