"""The backward pass waits for messages, where nothing else needs it."""

import time

import numpy as np
import pytest
import tensorflow as tf

from kdist.sharding.backward import PacedBackward


def noted(value, what, notes, *, stateful=False, seconds=0.0):
    """Returns the value, and notes when it is computed."""

    def note(array):
        time.sleep(seconds)
        notes.append(what)
        return array

    same = tf.numpy_function(note, [value], value.dtype, stateful=stateful)
    same.set_shape(value.shape)
    return same


def trained(notes, *, stateful=False, uses_gradients=False):
    """Returns a step of four layers, with a message for the gradient of each, that of the last layer first."""
    weights = [tf.Variable(tf.fill([3, 3], 0.5)) for _ in range(4)]

    def layer(x, place):
        @tf.custom_gradient
        def same(x):
            return tf.identity(x), lambda upstream: noted(upstream, ("layer", place), notes, stateful=stateful)

        return same(x @ weights[place])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            for place in range(4):
                x = layer(x, place)
            loss = tf.reduce_sum(x)
        gradients = tape.gradient(loss, weights)
        added = tf.linalg.global_norm(gradients) if uses_gradients else tf.constant(0.0)
        backward, sums = PacedBackward(gradients, [[3], [2], [1], [0]]), []
        for message, place in enumerate((3, 2, 1, 0)):
            sent = noted(gradients[place] + added, ("message", message), notes, stateful=True, seconds=0.05)
            backward.sent(message, [sent])
            sums.append(sent)
        return sums

    return step


def test_gradients_are_computed_after_the_message_before_the_last():
    notes = []
    trained(notes)(tf.ones([2, 3]))
    assert notes.index(("message", 0)) < notes.index(("layer", 1)), notes
    assert notes.index(("message", 1)) < notes.index(("layer", 0)), notes
    assert len(notes) == 8


@pytest.mark.parametrize("options", [{"stateful": True}, {"uses_gradients": True}])
def test_what_a_message_needs_does_not_wait_for_it(options):
    """TensorFlow orders what is stateful, as the messages of synchronised layers."""
    paced, plain = [], []
    values = trained(paced, **options)(tf.ones([2, 3]))
    assert sorted(paced) == sorted([("layer", each) for each in range(4)] + [("message", each) for each in range(4)])
    if not options.get("uses_gradients"):
        for one, other in zip(values, trained(plain)(tf.ones([2, 3])), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_gradient_that_alone_would_wait_is_computed_at_once():
    """Else the products of the backward pass were kept in its place, with the activations."""
    weights = [tf.Variable(tf.ones([3, 3])) for _ in range(3)]

    @tf.function
    def step(x, *upstream):
        gradients = [tf.matmul(x, each, transpose_a=True) for each in upstream]
        backward = PacedBackward(gradients, [[2], [1], [0]])
        for message, place in enumerate((2, 1, 0)):
            backward.sent(message, [gradients[place] + 1.0])
        return [weight.assign_add(each) for weight, each in zip(weights, gradients, strict=True)]

    graph = step.get_concrete_function(*[tf.ones([3, 3])] * 4).graph
    products = [each for each in graph.get_operations() if each.type == "MatMul"]
    assert len(products) == 3
    assert not any(each.control_inputs for each in products)


def test_gradients_from_outside_of_a_graph_are_sent_as_well():
    given = tf.ones([3])

    @tf.function
    def step(x):
        gradients = [given, x * 2.0, tf.IndexedSlices(x * 3.0, tf.constant([0, 1, 2]))]
        backward = PacedBackward(gradients, [[2], [1], [0]])
        for message, place in enumerate((2, 1, 0)):
            backward.sent(message, [gradients[place]])
        return gradients[1]

    np.testing.assert_array_equal(step(tf.ones([3])), [2.0, 2.0, 2.0])
