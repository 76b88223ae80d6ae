"""Callbacks, kdist's and Keras', with the failures that they are made for, on 2 and 3 ranks, over MPI and Horovod."""

import pytest

from tests.helpers import needs, spmd

TARGET = "tests.callbacks.all_cases:CASES"

# A launcher chooses the engine. Everything on two ranks over MPI; elsewhere one of each kind, and all of it by
# `python -m tests.callbacks.full`.
EVERYTHING = spmd.names(TARGET)
ELSEWHERE = [
    "ranks_that_differ_raise_on_all_ranks",
    "ranks_that_differ_are_repaired",
    "averages_count_true_samples",
    "averages_without_a_scope",
    "what_the_chief_starts_alone_is_refused",
    "a_nan_of_one_rank_is_raised_on_all",
]
LAUNCHES = [
    ("mpirun", 2, EVERYTHING, ()),
    ("mpirun", 3, ELSEWHERE, ()),
    ("horovodrun_gloo", 2, ELSEWHERE, needs.horovod),
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
