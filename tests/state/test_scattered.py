"""What a variable's methods write into some rows, as one tensor."""

import numpy as np
import pytest
import tensorflow as tf

from kdist.state.graphs.scattered import scattered

INDICES, UPDATES = [1, 3, 1], np.array([[1.0, 8.0], [2.0, -1.0], [0.5, 3.0]], "float32")
AS_SLICES = ("scatter_add", "scatter_max", "scatter_min", "scatter_sub", "scatter_update")
BY_PLACES = tuple(name.replace("scatter_", "scatter_nd_") for name in AS_SLICES)


@pytest.mark.parametrize("method", [*AS_SLICES, *BY_PLACES])
def test_it_is_what_the_method_writes(method):
    variable = tf.Variable(np.arange(10, dtype="float32").reshape(5, 2))
    places = np.array(INDICES)[:, None]
    values = [places, UPDATES] if method in BY_PLACES else [UPDATES, np.array(INDICES)]
    found = scattered(variable, method, values)
    getattr(variable, method)(*(values if method in BY_PLACES else [tf.IndexedSlices(UPDATES, INDICES)]))
    np.testing.assert_array_equal(found, variable)


@pytest.mark.parametrize("method", ["scatter_mul", "scatter_div", "batch_scatter_update", "_strided_slice_assign"])
def test_others_are_not_known(method):
    assert scattered(tf.Variable(np.ones((5, 2), "float32")), method, [UPDATES, np.array(INDICES)]) is None


def test_parts_of_nested_lists_are_not_known():
    """As of `scatter_nd_update([[place]], [row])` with tensors: how they were nested is not said."""
    variable = tf.Variable(np.ones((5, 2), "float32"))
    assert scattered(variable, "scatter_nd_update", [tf.constant(1), tf.ones([2])]) is None
    assert (
        scattered(variable, "scatter_nd_update", [tf.constant(1), tf.constant(2), tf.ones([2]), tf.ones([2])]) is None
    )
