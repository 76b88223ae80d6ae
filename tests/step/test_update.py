"""The update pipeline: stages run in the order of their phases, whoever adds them, and Keras' own update comes last."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.step.update import PHASES, Stage, UpdatePipeline


class Noting(Stage):
    def __init__(self, phase, seen, factor=1.0):
        self.phase, self._seen, self._factor = phase, seen, factor

    def __call__(self, update, proceed):
        self._seen.append(self.phase)
        update.gradients = [gradient * self._factor for gradient in update.gradients]
        return proceed()


@pytest.fixture
def variable():
    return keras.Variable([1.0, 2.0])


def built(variable, **settings):
    optimizer = keras.optimizers.SGD(1.0, **settings)
    optimizer.build([variable])
    return optimizer


@pytest.mark.parametrize("order", [PHASES, PHASES[::-1], PHASES[3:] + PHASES[:3]])
def test_the_order_is_that_of_the_phases(order, variable):
    seen, optimizer = [], built(variable)
    with UpdatePipeline([Noting(phase, seen) for phase in order]).opened([optimizer]):
        optimizer.apply_gradients([(tf.constant([1.0, 1.0]), variable)])
    assert seen == list(PHASES)
    np.testing.assert_array_equal(variable, [0.0, 1.0])


def test_stages_come_before_clipping(variable):
    """Keras clips what the stages have made of the gradients."""
    optimizer = built(variable, clipvalue=2.0)
    with UpdatePipeline([Noting("reduce", [], factor=10.0)]).opened([optimizer]):
        optimizer.apply([tf.constant([1.0, 0.1])], [variable])
    np.testing.assert_allclose(variable, [-1.0, 1.0])


def test_an_inner_optimizer_runs_no_stage_again(variable):
    seen, optimizer = [], keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=1.0)
    optimizer.build([variable])
    with UpdatePipeline([Noting("reduce", seen)]).opened([optimizer, optimizer.inner_optimizer]):
        optimizer.apply([tf.constant([1.0, 1.0])], [variable])
    assert seen == ["reduce"]


def test_an_override_of_the_users_runs_and_stays(variable):
    """It is the last of the pipeline, and is on the instance afterwards."""
    seen, optimizer = [], built(variable)
    apply = optimizer.apply

    def own(gradients, variables=None):
        seen.append("own")
        return apply(gradients, variables)

    optimizer.apply = own
    for _ in range(2):
        with UpdatePipeline([Noting("reduce", seen)]).opened([optimizer]):
            optimizer.apply([tf.constant([1.0, 1.0])], [variable])
        assert vars(optimizer)["apply"] is own
    assert seen == ["reduce", "own"] * 2


def test_collected_updates_run_later(variable):
    """As where XLA compiles the step up to its updates."""
    seen, optimizer = [], built(variable)
    pipeline = UpdatePipeline([Noting("reduce", seen)])
    with pipeline.opened([optimizer]):
        with pipeline.collecting() as collected:
            optimizer.apply_gradients([(tf.constant([1.0, 1.0]), variable)])
        assert seen == []
        np.testing.assert_array_equal(variable, [1.0, 2.0])
        for found, pairs in collected:
            found.apply_gradients(pairs)
    assert seen == ["reduce"]
    np.testing.assert_array_equal(variable, [0.0, 1.0])


def test_a_stage_that_raises_leaves_nothing_behind(variable):
    class Raising(Noting):
        def __call__(self, update, proceed):
            raise RuntimeError

    optimizer = built(variable)
    pipeline = UpdatePipeline([Raising("reduce", [])])
    with pytest.raises(RuntimeError), pipeline.opened([optimizer]):
        optimizer.apply([tf.constant([1.0, 1.0])], [variable])
    assert not {"apply", "apply_gradients"} & vars(optimizer).keys()
