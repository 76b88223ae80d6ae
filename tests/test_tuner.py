"""KerasTuner on two ranks: all of them run each trial together, and the chief writes."""

import pytest

from tests import tuner_cases
from tests.helpers import spmd


@pytest.fixture(scope="module")
def launched(request):
    return spmd.run(tuner_cases.__name__, 2, only=spmd.selected(request), timeout=300)


@pytest.mark.parametrize("case", spmd.names(tuner_cases.__name__))
def test_case(launched, case):
    launched.check(case)
