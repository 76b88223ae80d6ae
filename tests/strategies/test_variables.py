"""Variables that a step makes have their values while it is traced, and it is traced once."""

import keras
import pytest
import tensorflow as tf

from kdist.engines.single import SingleEngine
from kdist.strategies.all_reduce import AllReduceStrategy


@pytest.fixture
def scope():
    with AllReduceStrategy(SingleEngine()).scope():
        yield


def traced(make):
    """Returns how often TensorFlow traces a function that makes a variable once, the value then, and the result."""
    made, values = [], []

    @tf.function
    def function():
        if not made:
            made.append(make(tf.constant(2.0)))
        with tf.init_scope():
            values.append(made[0].numpy().tolist() if made[0].is_initialized() else None)
        return made[0] + 1

    return function().numpy().tolist(), values


def test_a_variable_has_its_value_at_once(scope):
    assert traced(lambda tensor: tf.Variable(lambda: tf.fill((2,), 3.0))) == ([4.0, 4.0], [[3.0, 3.0]])


def test_a_value_that_is_computed_of_the_graph_waits_for_it(scope):
    for make in (lambda tensor: tf.Variable(lambda: tensor * 3), lambda tensor: tf.Variable(tensor * 3)):
        result, values = traced(make)
        assert (result, values[0]) == (7.0, None)


def test_outside_of_the_scope_it_is_tensorflows():
    assert traced(lambda tensor: tf.Variable(lambda: 3.0)) == (4.0, [None, 3.0])


def test_an_optimizer_makes_its_slots_in_one_trace(scope):
    weight, optimizer, traces = keras.Variable([1.0, 2.0]), keras.optimizers.SGD(0.5, momentum=0.5), []

    @tf.function
    def step():
        traces.append(optimizer.built)
        optimizer.apply([tf.constant([1.0, 1.0])], [weight])

    step()
    step()
    assert traces == [False]
    assert weight.numpy().tolist() == [1 - 0.5 - 0.75, 2 - 0.5 - 0.75]
    assert optimizer.variables[-1].value.device == weight.value.device
