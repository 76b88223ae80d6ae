"""What three ranks do in one launch: the strategy in a custom loop, the functions of `kdist`, callbacks that count."""

import pytest

from tests.helpers import spmd

WHOLE = "tests.strategies.contract,tests.process_cases"
CALLBACKS = ("ranks_that_differ_raise_on_all_ranks", "averages_count_true_samples")


@pytest.fixture(scope="module")
def launched(request):
    return spmd.run(f"{WHOLE},tests.callbacks.all_cases:CASES", 3, only=spmd.selected(request), timeout=300)


@pytest.mark.parametrize("case", [*spmd.names(WHOLE), *CALLBACKS])
def test_case(launched, case):
    launched.check(case)
