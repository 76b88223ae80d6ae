"""What a user may count on beyond equal weights: the cases of behaviours_*.py, on 2 ranks."""

import pytest

from tests.helpers import spmd

MODULES = ("refusals", "callbacks", "scaling", "randomness", "order", "loops")
TARGET = ",".join(f"tests.training.behaviours_{module}:CASES" for module in MODULES)


@pytest.fixture(scope="module")
def launched(request):
    return spmd.run(TARGET, 2, only=spmd.selected(request), timeout=570)


@pytest.mark.parametrize("case", spmd.names(TARGET))
def test_case(launched, case):
    launched.check(case)
