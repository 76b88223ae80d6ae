"""The multiplier of a gradual warm-up, and its continuation after an interruption."""

from __future__ import annotations

import numpy as np
import pytest

from kdist.learning_rate.warmup import Warmup
from kdist.scaling import warmup_multiplier


def warmup(factor: float, length: float, *, began: float = 0.0) -> Warmup:
    made = Warmup(factor, began)
    made.set_length(length, began)
    return made


@pytest.mark.parametrize("length", [0.0, 7.5, 10.0])
def test_the_multiplier_rises_from_its_origin(length):
    multipliers = [float(warmup(4.0, length, began=3.0).multiplier(step)) for step in range(3, 20)]
    np.testing.assert_allclose(multipliers, [warmup_multiplier(step, 4.0, length) for step in range(17)], rtol=1e-6)


def test_it_begins_where_its_length_is_first_known():
    made = Warmup(2.0, 0.0)
    assert float(made.multiplier(6)) == 1.0
    assert made.progress() == {"origin": 0.0, "warmup_steps": None}
    made.set_length(10.0, 6.0)
    assert float(made.multiplier(11)) == 1.5
    made.set_length(20.0, 16.0)  # a longer one from the same origin
    assert float(made.multiplier(16)) == 1.5


def test_a_resumed_one_has_made_the_same_fraction():
    saved = {**warmup(2.0, 10.0).progress(), "stretch": 2.0}
    resumed = Warmup(4.0, 6.0)
    resumed.resume(saved, 6.0, 4.0)
    assert resumed.is_resumed
    resumed.continue_resumed(6.0)  # of 5 steps, each of which is twice as large
    np.testing.assert_allclose([float(resumed.multiplier(step)) for step in (6, 7, 8, 9)], [2.8, 3.4, 4, 4], rtol=1e-6)
    assert not resumed.is_resumed


def test_the_same_one_is_loaded_as_it_was():
    resumed = Warmup(2.0, 6.0)
    resumed.load(warmup(2.0, 10.0).progress())
    assert resumed.is_known
    assert float(resumed.multiplier(5)) == 1.5


def test_it_does_not_begin_again_where_the_count_of_steps_is_set_back():
    made = warmup(2.0, 10.0, began=100.0)
    made.notice_fewer_steps(105.0)
    assert float(made.multiplier(105)) == 1.5
    made.notice_fewer_steps(0.0)
    assert float(made.multiplier(0)) == 2.0
