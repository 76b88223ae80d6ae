"""The user's step at a step of an optimizer."""

from __future__ import annotations

from kdist.learning_rate.user_steps import UserSteps


def test_steps_count_as_several_from_a_known_one_on():
    steps = UserSteps(2.0)
    assert float(steps.at(3)) == 6.0
    steps.set_known(3.0, steps.at(3))
    steps.set_stretch(4.0)
    assert [float(steps.at(step)) for step in (3, 4, 5)] == [6.0, 10.0, 14.0]
    assert steps.progress(5) == {"steps_made": [3.0, 6.0], "user_steps": 14.0}


def test_large_numbers_are_exact():
    steps = UserSteps(3.0)
    steps.set_known(2.0**40 + 1, 3 * (2.0**40 + 1))
    assert float(steps.at(2**40 + 2)) == 3 * (2.0**40 + 2)


def test_they_begin_again_where_the_count_of_steps_is_set_back():
    steps = UserSteps(2.0)
    steps.set_known(10.0, 70.0)
    steps.notice_fewer_steps(12.0)
    assert float(steps.at(12)) == 74.0
    steps.notice_fewer_steps(0.0)
    assert float(steps.at(12)) == 24.0
