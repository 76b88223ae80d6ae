"""What a user may count on beyond equal weights: the cases of behaviours_*.py, on 2 ranks."""

import pytest

from tests.helpers import spmd

MODULES = ("refusals", "callbacks", "scaling", "randomness", "order")


def target(module):
    return f"tests.training.behaviours_{module}:CASES"


@pytest.fixture(scope="module")
def launches(request):
    """Launches each module once, with the cases that are asked for."""
    done = {}

    def launched(module):
        if module not in done:
            asked = [item.callspec.params for item in request.session.items if item.module is request.module]
            only = [each["case"] for each in asked if each["module"] == module]
            done[module] = spmd.run(target(module), 2, only=only, timeout=570)
        return done[module]

    return launched


@pytest.mark.parametrize(
    ("module", "case"), [(module, case) for module in MODULES for case in spmd.names(target(module))]
)
def test_case(launches, module, case):
    launches(module).check(case)
