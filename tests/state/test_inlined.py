"""Functions that a graph calls, replaced by what they compute."""

import numpy as np
import tensorflow as tf

from kdist.state.graphs.inlined import Inlined

WEIGHTS = tf.constant([[1.0, -2.0], [0.5, 3.0]])


@tf.function
def doubled(rows):
    return 2 * rows


@tf.function
def nested(rows, others):
    return tf.reduce_logsumexp(doubled(rows) * others), tf.shape(rows)


@tf.function
def drawn(rows):
    return rows * tf.random.uniform(())


def traced(function, *arguments):
    """Calls a function in a graph, with rows of an unknown number."""
    found = {}

    @tf.function(input_signature=[tf.TensorSpec([None, 2])], autograph=False)
    def step(rows):
        found.update(function(rows) or {})
        return [each for each in found.values() if isinstance(each, tf.Tensor)]

    return found, step(*arguments)


def test_a_copy_has_no_calls_and_the_same_value():
    def step(rows):
        value, shape = nested(tf.matmul(doubled(rows), WEIGHTS), rows)
        inlined = Inlined(lambda tensor: True, [])
        total = value + tf.cast(shape[0], tf.float32)
        return {"value": total, "copy": inlined(total), "again": inlined(total)}

    found, (value, copy, again) = traced(step, tf.constant([[0.1, 0.2], [0.3, -0.4], [0.5, 0.6]]))
    assert found["copy"] is found["again"]
    assert found["copy"] is not found["value"]
    np.testing.assert_allclose(copy, value, rtol=1e-6)
    pending, seen = [found["copy"].op], set()
    while pending:
        operation = pending.pop()
        if operation.name not in seen:
            seen.add(operation.name)
            assert not operation.type.endswith("PartitionedCall"), operation.name
            pending += [each.op for each in operation.inputs]


def test_what_has_an_original_needs_no_copy():
    """A network behind a call is computed once: what follows takes its outputs from the step."""

    def step(rows):
        outputs = tf.matmul(doubled(rows), WEIGHTS)
        inlined = Inlined(lambda tensor: True, [])
        copy = inlined(tf.reduce_max(outputs))
        rows_of_copy = copy.op.inputs[0]
        assert rows_of_copy.op.type == "MatMul"
        assert rows_of_copy is not outputs
        assert inlined.original(rows_of_copy) is outputs
        inner = rows_of_copy.op.inputs[0]
        assert inlined.original(inner).op.type.endswith("PartitionedCall")
        product = inner.op.inputs[0]
        assert product.op.type == "Mul"
        assert inlined.original(product) is product
        assert inlined.original(rows) is rows
        return {"copy": copy}

    traced(step, tf.ones([3, 2]))


def test_gradients_are_those_by_what_a_call_was_given():
    def step(rows):
        value, _ = nested(rows, rows**2)
        inlined = Inlined(lambda tensor: True, [])
        copy = inlined(value)
        inner = copy.op.inputs[0]
        (gradient,) = tf.gradients(copy, inner)
        targets = inlined.recorded([(inner, gradient)])
        assert all(not tensor.op.name.startswith("inlined") for tensor, _ in targets)
        expected = tf.gradients(value, rows)[0]
        by_rows = tf.add_n([tf.gradients(tensor, rows, upstream)[0] for tensor, upstream in targets])
        return {"expected": expected, "found": by_rows}

    _, (expected, found) = traced(step, tf.constant([[0.1, 0.2], [0.3, -0.4]]))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_cannot_be_repeated_is_called():
    def step(rows):
        value = tf.reduce_max(drawn(rows))
        assert Inlined(lambda tensor: True, [])(value) is value
        ends = tf.reduce_max(doubled(rows))
        assert Inlined(lambda tensor: True, [ends])(ends) is ends
        return {"value": value}

    traced(step, tf.ones([3, 2]))
