"""Changes of a rate on some ranks, and the rate that all ranks take."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from kdist.learning_rate.agreed_rate import AgreedRate


def test_all_ranks_take_the_mean_of_the_changed_rates():
    optimizers = [keras.optimizers.SGD(0.1) for _ in range(3)]
    ranks = [AgreedRate(each) for each in optimizers]
    optimizers[0].learning_rate, optimizers[2].learning_rate = 0.3, 0.5
    assert [float(each.is_changed()) for each in ranks] == [1.0, 0.0, 1.0]
    change = np.sum([each.local_change() for each in ranks], axis=0)
    for each, optimizer in zip(ranks, optimizers, strict=True):
        each.apply_change(change)
        assert float(optimizer.learning_rate) == pytest.approx(0.4)
        assert not float(each.is_changed())


def test_a_rate_that_all_ranks_have_loaded_is_no_change():
    optimizer = keras.optimizers.SGD(0.1)
    rate = AgreedRate(optimizer)
    optimizer.learning_rate = 0.2
    rate.set_to_stored()
    assert not float(rate.is_changed())
    np.testing.assert_array_equal(rate.local_change(), [0.0, 0.0])


def test_a_schedule_does_not_change():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    optimizer = keras.optimizers.SGD(schedule)
    rate = AgreedRate(optimizer)
    rate.apply_change(rate.local_change())
    assert not float(rate.is_changed())
    assert optimizer._learning_rate is schedule
