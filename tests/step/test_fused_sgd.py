"""SGD's fused updates are Keras' own, bit for bit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.step.fused_sgd import fused_sgd

STEPS = 3
SHAPE = (37, 53)  # not a multiple of a vector register


def trained(optimizer, dtype, gradients, update):
    variable = keras.Variable(np.random.default_rng(0).standard_normal(SHAPE), dtype=dtype)
    optimizer.build([variable])
    with update(optimizer):
        for gradient in gradients:
            optimizer.update_step(gradient, variable.value, tf.constant(0.013))
    return [np.asarray(each) for each in (variable, *optimizer.momentums)]


def keras_own(optimizer):
    class Nothing:
        def __enter__(self):
            assert "update_step" not in vars(optimizer)

        def __exit__(self, *exception):
            pass

    return Nothing()


def gradients_of(dtype):
    generator = np.random.default_rng(1)
    return [tf.cast(generator.standard_normal(SHAPE), dtype) for _ in range(STEPS)]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16", "complex64"])
@pytest.mark.parametrize("arguments", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_fused_updates_are_keras_own_bit_for_bit(arguments, dtype):
    gradients = gradients_of(dtype)
    expected = trained(keras.optimizers.SGD(**arguments), dtype, gradients, keras_own)
    found = trained(keras.optimizers.SGD(**arguments), dtype, gradients, fused_sgd)
    for one, other in zip(expected, found, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("arguments", [{}, {"momentum": 0.9}])
def test_rows_of_an_embedding_are_updated_as_keras_does(arguments):
    rows = tf.IndexedSlices(tf.ones([2, SHAPE[1]]), tf.constant([5, 7]), dense_shape=tf.constant(SHAPE))
    expected = trained(keras.optimizers.SGD(**arguments), "float32", [rows], keras_own)
    found = trained(keras.optimizers.SGD(**arguments), "float32", [rows], fused_sgd)
    for one, other in zip(expected, found, strict=True):
        assert one.tobytes() == other.tobytes()


class Signs(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, tf.sign(gradient) * learning_rate)


@pytest.mark.parametrize("optimizer", [Signs(momentum=0.9), keras.optimizers.Adam()], ids=["subclass", "Adam"])
def test_other_updates_are_left_alone(optimizer):
    before = optimizer.update_step
    with fused_sgd(optimizer):
        assert optimizer.update_step == before


@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [("float32", {"ResourceApplyKerasMomentum"}), ("float16", {"ResourceApplyKerasMomentum"}), ("bfloat16", set())],
)
def test_only_what_has_a_kernel_on_every_device_is_fused(dtype, kernels):
    optimizer, variable = keras.optimizers.SGD(momentum=0.9), keras.Variable(np.zeros(SHAPE), dtype=dtype)
    optimizer.build([variable])

    @tf.function(autograph=False)
    def update(gradient):
        with fused_sgd(optimizer):
            optimizer.update_step(gradient, variable.value, 0.1)

    graph = update.get_concrete_function(tf.TensorSpec(SHAPE, dtype)).graph
    kinds = {op.type for op in graph.get_operations()}
    assert kinds & {"ResourceApplyKerasMomentum", "Mul"} == (kernels or {"Mul"})
