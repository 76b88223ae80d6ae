"""Embedding tables in parts, on 2 ranks over MPI; on 3, over TensorFlow's collectives, what depends on the number.

All cases on each number of ranks: `python -m tests.training.full --only tables`.
"""

import pytest

from tests.helpers.jobs import job
from tests.training.tables import CASES, WITH_SLOTS_IN_PARTS

TARGET = "tests.training.tables:CASES"
SLOW = (
    "averages_of_weights",
    "constraints",
    "decay_that_leaves_the_table_out",
    "other_elementwise_optimizers",
    *(f"{name}_with_slots_in_parts" for name in WITH_SLOTS_IN_PARTS if name != "resumed"),
)
ON_THREE = ("initial_values", "ranks_without_rows")
CELLS = [*((("mpi", 2), name) for name in CASES if name not in SLOW), *((("collective", 3), name) for name in ON_THREE)]


@pytest.fixture(scope="module")
def launches(request):
    done = {}

    def launched(on):
        asked = [item.callspec.params for item in request.session.items if item.module is request.module]
        if on not in done:
            only = [each["case"] for each in asked if each["on"] == on]
            done[on] = job(*on).run(TARGET, only=only, timeout=570)
        return done[on]

    return launched


@pytest.mark.parametrize(("on", "case"), CELLS, ids=[f"{engine} on {n}: {name}" for (engine, n), name in CELLS])
def test_case(launches, on, case):
    launches(on).check(case)
