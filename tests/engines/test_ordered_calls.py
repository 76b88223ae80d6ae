"""Python in a graph."""

import weakref

import numpy as np
import tensorflow as tf

from kdist.engines.arrays import fusion
from kdist.engines.tensors.ordered_calls import LARGE_BYTES, OrderedCalls


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


def test_results_that_nothing_uses_take_no_memory_in_the_next_call():
    in_turn, results, alive = OrderedCalls("order"), [], []
    variable = tf.Variable(tf.zeros([LARGE_BYTES // 4]))

    def exchange(array):
        alive.append(sum(each() is not None for each in results))
        result = fusion.empty(array.size, array.dtype)
        result[:] = array + 1
        results.append(weakref.ref(result.base))
        return [result]

    @tf.function(autograph=False)
    def step():
        done = []
        for _ in range(4):
            with tf.control_dependencies(done):
                (value,) = in_turn.call(exchange, [variable.read_value()])
                done = [variable.assign(tf.ensure_shape(value, variable.shape), read_value=False)]

    step()
    assert float(variable[0]) == 4
    assert alive == [0, 1, 1, 1]  # the variable's value
