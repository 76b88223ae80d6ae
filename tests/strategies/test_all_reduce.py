"""`AllReduceStrategy` on 2 and 3 ranks."""

import pytest

from tests.helpers import spmd

TARGET = "tests.strategies.contract"


@pytest.fixture(scope="module", params=[2, 3])
def launched(request):
    return spmd.run(TARGET, request.param, only=spmd.selected(request), timeout=240)


@pytest.mark.parametrize("case", spmd.names(TARGET))
def test_case(launched, case):
    launched.check(case)
