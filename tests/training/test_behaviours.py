"""What a user may count on beyond equal weights: the cases of behaviours_*.py, on 2 ranks."""

import pytest

from tests.helpers import spmd

MODULES = ("refusals", "callbacks", "scaling", "randomness", "order", "loops")
TARGET = ",".join(f"tests.training.behaviours_{module}:CASES" for module in MODULES)


@pytest.fixture(scope="module")
def launches():
    return {}


@pytest.mark.parametrize("case", spmd.names(TARGET))
def test_case(launches, request, case):
    if case not in launches:
        only = spmd.batch_with(case, spmd.selected(request))
        launches |= dict.fromkeys(only, spmd.run(TARGET, 2, only=only, timeout=570))
    launches[case].check(case)
