"""Updates of large variables in a graph wait for each other."""

import time

import numpy as np
import pytest
import tensorflow as tf

from kdist.strategies.update_chain import LARGE_BYTES, UpdateChain


@pytest.mark.parametrize("in_branch", [False, True])
def test_an_update_begins_when_the_one_before_has_ended(in_branch):
    variables = [tf.Variable(tf.zeros(LARGE_BYTES // 4)) for _ in range(4)]
    began = []

    def slow(place):
        time.sleep(0.05 * (4 - place))  # else the first would often end first anyway
        began.append((place, [float(each[0]) for each in variables]))
        return np.float32(1)

    def update(variable, place):
        # Not stateful: TensorFlow would order these by itself.
        variable.assign_add(tf.fill(variable.shape, tf.numpy_function(slow, [place], tf.float32, stateful=False)))

    @tf.function
    def step(condition, zero):  # which is not known in the graph: constants would be computed before it runs
        chain = UpdateChain()

        def run():
            for place, variable in enumerate(variables):
                chain.run(update, variable, place + zero)
            return tf.constant(0)

        return tf.cond(condition, run, lambda: tf.constant(0)) if in_branch else run()

    step(tf.constant(True), tf.constant(0))
    assert began == [(place, [1.0] * place + [0.0] * (4 - place)) for place in range(4)]


def test_small_updates_and_eager_ones_run_as_they_are():
    chain, small = UpdateChain(), tf.Variable(1.0)
    assert chain.run(lambda variable, added: float(variable.assign_add(added)), small, 2.0) == 3

    @tf.function
    def step():
        for _ in range(2):
            chain.run(lambda variable: variable.assign_add(1.0), small)

    step()
    assert float(small) == 5
    assert "VarIsInitializedOp" not in {op.type for op in step.get_concrete_function().graph.get_operations()}
