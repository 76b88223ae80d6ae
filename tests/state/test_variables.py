"""A model as arrays, without ranks: `tests/callbacks` holds the resume of whole trainings."""

import keras
import numpy as np
import pytest

from kdist.engines.single import SingleEngine
from kdist.errors import CheckpointError
from kdist.state.comparison import first_difference
from kdist.state.variables import ModelState


class Scaled(keras.layers.Layer):
    """Has a weight without a dimension, of which TensorFlow makes no NumPy array by itself where it is bfloat16."""

    def build(self, input_shape):
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, inputs):
        return inputs * self.factor


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_model_comes_back_bit_for_bit(dtype):
    model = keras.Sequential([keras.layers.Dense(2, dtype=dtype), Scaled(dtype=dtype)])
    model.compile("adam", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    saved, before = ModelState(model).state_dict(), [np.array(variable.value.numpy()) for variable in model.variables]
    assert first_difference(SingleEngine(), model.variables) is None
    for variable in model.variables:
        variable.assign(keras.ops.zeros_like(variable))
    ModelState(model).load_state_dict(saved)
    assert [each.tobytes() for each in before] == [variable.value.numpy().tobytes() for variable in model.variables]


def test_a_model_with_fewer_variables_is_another_one():
    """An optimizer that the first update builds is not built yet when a checkpoint is loaded."""
    saved = []
    for depth in (2, 1):
        model = keras.Sequential([keras.Input((3,)), *(keras.layers.Dense(3) for _ in range(depth))])
        model.optimizer = keras.optimizers.Adam()
        if depth == 2:
            model.optimizer.build(model.trainable_variables)
            saved = ModelState(model).state_dict()
    with pytest.raises(CheckpointError, match="of another model or optimizer"):
        ModelState(model).load_state_dict(saved)


def test_an_optimizer_that_was_built_with_raw_variables_comes_back():
    saved = []
    for _ in range(2):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.optimizer = keras.optimizers.Adam()
        if not saved:
            model.optimizer.apply(
                [weight.value for weight in model.weights], [weight.value for weight in model.weights]
            )
            assert ModelState(model).untracked == []
            saved.append(ModelState(model).state_dict())
    ModelState(model).load_state_dict(saved[0])
    assert model.optimizer.built
