"""Callbacks, kdist's and Keras', with the failures that they are made for, on 2 ranks; on 3: `test_three_ranks.py`."""

import pytest

from tests.helpers import spmd

TARGET = "tests.callbacks.all_cases:CASES"

# All of it, over Horovod too, and slow ones that resemble another: `python -m tests.callbacks.full`.
SLOW = (
    "a_rank_slow_in_its_steps_is_named",
    "a_second_fit_has_its_own",
    "from_an_initial_epoch_and_resumed",
    "piecewise_and_smooth_multipliers",
    "several_steps_an_execution_and_accumulation",
    "skipping_in_eager_steps",
    "skipping_takes_back_what_another_optimizer_did",
    "skipping_with_accumulation_and_momentum",
    "skipping_within_an_execution_of_several_steps",
    "what_is_counted_is_right_in_an_execution_of_several_steps",
    "with_loss_scaling_as_in_one_process",
)


@pytest.fixture(scope="module")
def launches(request):
    """Launches the cases that are asked for, a batch at a time."""
    done = {}

    def launched(case):
        only = spmd.batch_with(case, spmd.selected(request))
        if only[0] not in done:
            done[only[0]] = spmd.run(TARGET, 2, only=only, timeout=570)
        return done[only[0]]

    return launched


@pytest.mark.parametrize("case", [name for name in spmd.names(TARGET) if name not in SLOW])
def test_case(launches, case):
    launches(case).check(case)
