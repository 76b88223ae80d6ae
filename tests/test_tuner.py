"""KerasTuner on two ranks: all of them run each trial together, and the chief writes.

All cases: `python -m tests.training.full --only tuner`.
"""

import pytest

from tests import tuner_cases
from tests.helpers import spmd

SLOW = ("case_hyperband", "case_the_chief_alone_writes")  # which resemble others


@pytest.fixture(scope="module")
def launched(request):
    return spmd.run(tuner_cases.__name__, 2, only=spmd.selected(request), timeout=300)


@pytest.mark.parametrize("case", [case for case in spmd.names(tuner_cases.__name__) if case not in SLOW])
def test_case(launched, case):
    launched.check(case)
