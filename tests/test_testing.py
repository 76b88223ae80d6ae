"""Faults that do not end a job, on 2 ranks and in one process."""

import pytest

from tests.helpers import spmd

TARGET = "tests.testing_cases"


@pytest.fixture(scope="module")
def launched(request):
    return spmd.run(TARGET, 2, only=spmd.selected(request))


@pytest.mark.parametrize("case", spmd.names(TARGET))
def test_case(launched, case):
    first, *others = launched.values(case)
    assert all(other == first for other in others)


def test_in_one_process():
    spmd.run(TARGET, 1).check()
