"""What scripts keep of Horovod is refused, with the line to leave out."""

import keras
import pytest

from kdist.errors import StrategyError
from kdist.trainer.other_libraries import refuse_parts_of_horovod
from tests.helpers import needs


@needs.horovod
def test_a_callback_of_horovods_is_refused():
    from horovod.tensorflow.keras.callbacks import MetricAverageCallback

    horovods = MetricAverageCallback()
    for callbacks in (horovods, [keras.callbacks.TerminateOnNaN(), horovods], keras.callbacks.CallbackList([horovods])):
        with pytest.raises(StrategyError, match="Fix: leave MetricAverageCallback out"):
            refuse_parts_of_horovod([], callbacks)


@needs.horovod
def test_an_optimizer_of_horovods_is_refused():
    from horovod.tensorflow.keras import DistributedOptimizer

    horovods = DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(StrategyError, match="Fix: leave DistributedOptimizer out"):
        refuse_parts_of_horovod([keras.optimizers.Adam(), horovods], None)


def test_keras_own_are_not():
    for callbacks in (None, [], keras.callbacks.TerminateOnNaN(), keras.callbacks.CallbackList([])):
        refuse_parts_of_horovod([keras.optimizers.SGD()], callbacks)
