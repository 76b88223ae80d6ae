"""What a user may count on beyond equal weights: the cases of behaviours_*.py, on 2 ranks or on 3."""

import pytest

from tests.helpers import spmd

LAUNCHES = (
    *((module, 2) for module in ("refusals", "callbacks", "scaling", "randomness")),
    ("order", 3),
)


def target(module):
    return f"tests.training.behaviours_{module}:CASES"


PARAMETERS = [(module, ranks, case) for module, ranks in LAUNCHES for case in spmd.names(target(module))]


@pytest.fixture(scope="module")
def launches(request):
    """Launches each module once on each number of ranks, with the cases that are asked for."""
    done = {}

    def launched(module, ranks):
        if (module, ranks) not in done:
            asked = [item.callspec.params for item in request.session.items if item.module is request.module]
            only = [each["case"] for each in asked if (each["module"], each["ranks"]) == (module, ranks)]
            done[module, ranks] = spmd.run(target(module), ranks, only=only, timeout=570)
        return done[module, ranks]

    return launched


@pytest.mark.parametrize(("module", "ranks", "case"), PARAMETERS)
def test_case(launches, module, ranks, case):
    launches(module, ranks).check(case)
