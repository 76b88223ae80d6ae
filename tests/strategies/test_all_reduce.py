"""`AllReduceStrategy` on 3 ranks."""

import pytest

from tests.helpers import spmd

TARGET = "tests.strategies.contract"


@pytest.fixture(scope="module")
def launched(request):
    return spmd.run(TARGET, 3, only=spmd.selected(request), timeout=240)


@pytest.mark.parametrize("case", spmd.names(TARGET))
def test_case(launched, case):
    launched.check(case)
