"""When a step is traced again: without the number of its rows, with it, or after a trace that made variables."""

import pytest
import tensorflow as tf

from kdist.step.traced_rows import TracedRows


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
