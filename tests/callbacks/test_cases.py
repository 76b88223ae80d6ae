"""Callbacks, kdist's and Keras', with the failures that they are made for, on 2 and 3 ranks, over MPI and Horovod."""

import pytest

from tests.helpers import needs, spmd

TARGET = "tests.callbacks.all_cases:CASES"

# A launcher chooses the engine. Most on two ranks over MPI, elsewhere one of each kind; all of it, and slow ones that
# resemble another, by `python -m tests.callbacks.full`.
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
MOST = [name for name in spmd.names(TARGET) if name not in (*SLOW, "averages_without_a_scope")]
ON_THREE = ["ranks_that_differ_raise_on_all_ranks", "averages_count_true_samples"]
ON_HOROVOD = ["ranks_that_differ_are_repaired", "averages_without_a_scope"]
LAUNCHES = [
    ("mpirun", 2, MOST, ()),
    ("mpirun", 3, ON_THREE, ()),
    ("horovodrun_gloo", 2, ON_HOROVOD, needs.horovod),
]
PARAMETERS = [
    pytest.param(launcher, ranks, case, marks=marks) for launcher, ranks, cases, marks in LAUNCHES for case in cases
]


@pytest.fixture(scope="module")
def launches(request):
    """Launches the cases that are asked for, a batch at a time, by each launcher on each number of ranks."""
    done = {}

    def launched(launcher, ranks, case):
        only = spmd.batch_with(case, spmd.selected(request, launcher=launcher, ranks=ranks), size=30)
        if (launcher, ranks, only[0]) not in done:
            done[launcher, ranks, only[0]] = spmd.run(TARGET, ranks, only=only, launcher=launcher, timeout=570)
        return done[launcher, ranks, only[0]]

    return launched


@pytest.mark.parametrize(("launcher", "ranks", "case"), PARAMETERS)
def test_case(launches, launcher, ranks, case):
    launches(launcher, ranks, case).check(case)
