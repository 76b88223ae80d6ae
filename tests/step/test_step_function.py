"""A model's steps without what TensorFlow's Python does around them: the same as Keras' own function makes."""

import gc
import sys
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.step.step_function import StepFunction
from kdist.step.traced_rows import TracedRows

ROWS = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")


def iterator(batch=4):
    return iter(tf.data.Dataset.from_tensor_slices((ROWS, ROWS[:, :2])).batch(batch))


class Traced(keras.Sequential):
    """Counts how often its step is run by Python."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.runs = 0

    def train_step(self, data):
        self.runs += 1
        return super().train_step(data)


@pytest.fixture
def model():
    keras.utils.set_random_seed(0)
    model = Traced([keras.Input((5,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=["mae"])
    model.train_on_batch(ROWS, ROWS[:, :2])  # which makes all variables, as `fit` does before its first step
    model.runs = 0
    return model


def functions(model):
    """Returns Keras' own function, and kdist's around it."""
    model.make_train_function(force=True)
    return model.train_function, StepFunction(model, lambda own=model.train_function: own, TracedRows())


def test_a_step_is_keras_own(model):
    start, logs = model.get_weights(), []
    for function in functions(model):
        model.set_weights(start)
        model.reset_metrics()
        elements = iterator()
        logs.append([{name: float(value) for name, value in function(elements).items()} for _ in range(6)])
    assert logs[0] == logs[1]
    assert set(logs[0][0]) == {"loss", "mae"}


def test_the_end_of_the_data_is_told_as_keras_tells_it(model):
    _, ours = functions(model)
    elements = iterator(24)
    ours(elements)
    with pytest.raises(tf.errors.OutOfRangeError):
        ours(elements)


def python_calls(run):
    """Returns how many functions of Python a call of `run` calls, on average."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    run()  # which traces
    run()
    sys.setprofile(note)
    try:
        for _ in range(5):
            run()
    finally:
        sys.setprofile(None)
    return count / 5


def test_a_step_calls_less_python_than_keras_own(model):
    calls = []
    for function in functions(model):
        elements = iterator(2)
        calls.append(python_calls(lambda function=function, elements=elements: function(elements)))
    assert calls[1] < calls[0] / 3


def test_a_step_on_a_batch_is_keras_own_and_calls_less_python(model):
    def on_batch(function, *batch):
        return {name: float(value) for name, value in function(iter([batch])).items()}

    start, found, calls = model.get_weights(), [], []
    x, y = ROWS, ROWS[:, :2]
    weight = np.linspace(0, 1, len(x), dtype="float32")
    for function in functions(model):
        model.set_weights(start)
        model.reset_metrics()
        batches = [(x, y, None), (x, y, weight), (tf.constant(x), y, None), (x[:4], y[:4], None), ([x], y, None)]
        found.append([on_batch(function, *batch) for batch in batches])
        calls.append(python_calls(lambda function=function: function(iter([(x, y, None)]))))
    assert found[0] == found[1]
    assert calls[1] < calls[0] / 3


def test_batches_of_known_shapes_are_not_traced_anew(model):
    _, ours = functions(model)
    x, y = ROWS, ROWS[:, :2]
    for _ in range(2):
        for size in (8, 6, 4, 3):
            ours([(x[:size], y[:size], None)])
            ours([(tf.constant(x[:size]), y[:size], None)])
    assert model.runs == 2
    ours([(x[:8].astype("float64"), y[:8], None)])
    assert model.runs == 3


def test_batches_in_a_graph_of_the_users(model):
    _, ours = functions(model)

    @tf.function(autograph=False)
    def step(x, y):
        return ours([(x, y, None)])["loss"]

    before = model.optimizer.iterations.numpy()
    assert float(step(ROWS, ROWS[:, :2])) > 0
    assert model.optimizer.iterations.numpy() == before + 1


def test_passes_share_a_trace_and_are_let_go(model):
    _, ours = functions(model)
    watched = []
    for _ in range(3):
        elements = iterator()
        ours(elements)
        watched.append(weakref.ref(elements))
    assert model.runs == 1
    del elements
    gc.collect()
    assert [each() for each in watched] == [None] * 3


def test_elements_of_another_shape_are_traced_anew_and_the_shapes_then_relaxed(model):
    _, ours = functions(model)
    for size in (8, 6, 4, 3):
        ours(iter(tf.data.Dataset.from_tensor_slices((ROWS, ROWS[:, :2])).batch(size, drop_remainder=True)))
    assert model.runs == 2


def test_steps_become_eager_at_once(model):
    _, ours = functions(model)
    elements = iterator()
    ours(elements)
    ours(elements)
    tf.config.run_functions_eagerly(True)
    try:
        ours(elements)
        ours(elements)
    finally:
        tf.config.run_functions_eagerly(False)
    assert model.runs == 3


@pytest.mark.parametrize("steps", [1, 3])
def test_executions_of_several_steps_and_batches_that_are_given(model, steps):
    model.steps_per_execution = steps
    _, ours = functions(model)
    elements, before = iterator(), model.optimizer.iterations.numpy()
    ours(elements)
    assert model.optimizer.iterations.numpy() == before + steps
    ours([next(elements)])
    assert model.optimizer.iterations.numpy() == before + steps + 1
