"""A model's steps with less Python around them, the same as Keras' own; when they are traced, and traced again."""

import gc
import sys
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.step.step_function import StepFunction, TracedRows, variable_with_value

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


class Steps:
    """Traces a step, and counts.

    Args:
        step: callable of the `TracedRows`, the body of the step.
    """

    def __init__(self, step, **arguments):
        self.rows = TracedRows(**arguments)
        self.traces = []  # whether the rows were unknown
        self._step = step
        self.renew()

    def renew(self):
        """Makes a new function."""

        def run():
            self.traces.append(self.rows.are_unknown)
            with self.rows.tracing():
                return self._step(self.rows)

        self._function = tf.function(run, autograph=False)

    def traced(self):
        """Traces the step."""
        return self.rows.traced(lambda: self._function.get_concrete_function(), self.renew)


def test_a_step_that_asks_for_nothing_is_traced_once():
    steps = Steps(lambda rows: tf.constant(1))
    assert float(steps.traced()()) == 1
    assert steps.traces == [False]


def test_a_step_for_which_it_matters_is_traced_again_without_the_number():
    asked = []
    steps = Steps(lambda rows: asked.append(rows.is_traced_again(knows_number=not rows.are_unknown)))
    steps.traced()
    steps.renew()
    steps.traced()
    assert steps.traces == [False, True, True]
    assert asked == [True, False, False]


def test_a_step_that_reads_the_number_is_traced_with_it_from_then_on():
    def reads(rows):
        if rows.are_unknown:
            raise TypeError("no number")
        return tf.constant(int(rows.is_traced_again(knows_number=True)))

    steps = Steps(reads)
    steps.rows.hide_row_count()
    assert int(steps.traced()()) == 0
    steps.renew()
    steps.rows.hide_row_count()
    steps.traced()
    assert steps.traces == [True, False, False]


def test_an_error_of_the_steps_own_is_raised_as_it_is():
    def fails(rows):
        raise ValueError("mine")

    steps = Steps(fails)
    steps.rows.hide_row_count()
    with pytest.raises(ValueError, match="mine") as raised:
        steps.traced()
    assert raised.value.__context__ is None
    assert steps.traces == [True, False]


def test_a_step_that_makes_variables_is_traced_once_more_with_them():
    made, values = [], []

    def makes(rows):
        is_first = not made
        if is_first:
            made.append(tf.Variable(lambda: tf.fill((2,), 3.0)))
        with tf.init_scope():
            values.append(made[0].numpy().tolist())
        return made[0] * (1 if is_first else 2)

    steps = Steps(makes)
    assert steps.traced()().numpy().tolist() == [6.0, 6.0], "what is kept is a trace that has made nothing"
    assert values == [[3.0, 3.0]] * 2
    steps.renew()
    steps.traced()
    assert steps.traces == [False, False, False]


def test_a_step_that_makes_variables_in_each_trace_is_refused_by_tensorflow():
    made = []

    def makes(rows):
        made.append(tf.Variable(lambda: 1.0))
        return tf.constant(0.0)

    with pytest.raises(ValueError, match="singleton"):
        Steps(makes).traced()
    assert len(made) <= 3


def test_variables_of_a_trace_that_has_failed_are_kept():
    made = []

    def fails(rows):
        if not made:
            made.append(tf.Variable(lambda: 3.0))
        if rows.are_unknown:
            raise TypeError("no number")
        if len(made) == 1:
            made.append(tf.Variable(lambda: 4.0))
        return made[0] * made[1]

    steps = Steps(fails)
    steps.rows.hide_row_count()
    assert float(steps.traced()()) == 12
    assert steps.traces == [True, False, False]


def made(**kwargs):
    """Returns what is made in a function, and its value in the trace."""
    found = []

    @tf.function
    def function():
        tensor = tf.constant(2.0)
        variable = variable_with_value({name: value(tensor) for name, value in kwargs.items()})
        with tf.init_scope():
            found.append((variable, None if variable is None else variable.numpy().tolist()))

    function.get_concrete_function()
    ((variable, value),) = found
    return variable, value


def test_a_value_is_there_at_once():
    variable, value = made(initial_value=lambda _: lambda: tf.fill((2,), 3.0), name=lambda _: "three")
    assert (variable.name, value, variable.numpy().tolist()) == ("three:0", [3.0, 3.0], [3.0, 3.0])


def test_it_is_as_it_was_asked_for():
    place = type("Place", (), {"device": "/device:CPU:0"})
    variable, _ = made(
        initial_value=lambda _: lambda: 3.0,
        colocate_with=lambda _: place,
        trainable=lambda _: False,
        aggregation=lambda _: tf.VariableAggregation.ONLY_FIRST_REPLICA,
        shape=lambda _: tf.TensorShape([]),
        dtype=lambda _: tf.float64,
    )
    assert variable.device.endswith("CPU:0")
    assert not variable.trainable
    assert variable.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
    assert (variable.shape.rank, variable.dtype) == (0, tf.float64)


def test_what_must_stay_in_the_graph_does():
    lifting = "experimental_enable_variable_lifting"
    assert made(initial_value=lambda _: lambda: 3.0, **{lifting: lambda _: False}) == (None, None)


def test_a_value_of_the_graph_waits_for_it():
    assert made(initial_value=lambda tensor: lambda: tensor * 3) == (None, None)
    assert made(initial_value=lambda tensor: tensor * 3) == (None, None)


def test_outside_of_a_function_nothing_is_made():
    assert variable_with_value({"initial_value": lambda: 3.0}) is None
