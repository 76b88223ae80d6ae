"""Slots as a part of the state, whatever the shapes of the weights that they belong to."""

import keras
import numpy as np
import tensorflow as tf

from kdist.engines.single import SingleEngine
from kdist.state.slots import SlotState
from kdist.state.written import WrittenState
from kdist.step.local_sgd import LocalSGD


class Scale(keras.layers.Layer):
    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs):
        return inputs * self.scale


def after_one_step(model, local_sgd):
    local_sgd.after_step(tf.zeros([3]), lambda votes: None)
    local_sgd.average_all()
    return SlotState(model, local_sgd).state_dict()


def test_the_slot_of_a_scalar_is_an_array_and_comes_back():
    model = keras.Sequential([keras.Input((2,)), Scale()])
    settings = {"every": 2, "learning_rate": 1.0, "momentum": 0.5, "bucket_mb": None}
    trained, resumed = (LocalSGD(model, SingleEngine(), WrittenState(SingleEngine()), **settings) for _ in range(2))
    trained.begin()
    model.layers[0].scale.assign(3.0)
    state = after_one_step(model, trained)
    assert isinstance(state["velocity/0"], np.ndarray)
    assert state["velocity/0"] == 2.0
    SlotState(model, resumed).load_state_dict(state)
    resumed.begin()
    assert after_one_step(model, resumed)["velocity/0"] == 1.0  # nothing has moved since: momentum alone
