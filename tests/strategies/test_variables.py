"""Variables that have their values while a function that makes them is traced."""

import tensorflow as tf

from kdist.strategies.variables import variable_with_value


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
