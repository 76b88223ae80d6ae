"""Python in a graph."""

import numpy as np
import tensorflow as tf

from kdist.engines.tensors.ordered_calls import OrderedCalls


def test_the_first_function_that_calls_is_traced_once():
    """The variable of the order is made meanwhile, and is none of the function's own."""
    in_turn, traces = OrderedCalls("order"), []

    @tf.function(autograph=False)
    def doubled(tensor):
        traces.append(tensor)
        return in_turn.call(lambda array: [2 * array], [tensor])

    for _ in range(2):
        np.testing.assert_array_equal(doubled(tf.constant([1.0]))[0], [2.0])
    assert len(traces) == 1
