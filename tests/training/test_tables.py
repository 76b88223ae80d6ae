"""Embedding tables in parts, on 2 ranks over MPI; on 3, over TensorFlow's collectives, what depends on the number.

All cases on each number of ranks: `python -m tests.training.full --only tables`.
"""

import functools

import pytest

from tests.helpers import spmd
from tests.helpers.jobs import job
from tests.training.tables import CASES, WITH_SLOTS_IN_PARTS

TARGET = "tests.training.tables:CASES"
SLOW = (
    "accumulated_gradients",
    "averages_of_weights",
    "batches_by_hand",
    "constraints",
    "decay_that_leaves_the_table_out",
    "frozen_tables",
    "gradients_in_several_messages",
    "masks",
    "other_elementwise_optimizers",
    *(f"{name}_with_slots_in_parts" for name in WITH_SLOTS_IN_PARTS if name != "resumed"),
)
SLOTS_ON_THREE = "sparse_gradients"  # of `shard="optimizer"`, so that one launch of three ranks is enough
ON_THREE = ("initial_values", "ranks_without_rows")
CELLS = [
    *((("mpi", 2), name) for name in CASES if name not in SLOW + ON_THREE),
    *((("collective", 3), name) for name in (*ON_THREE, SLOTS_ON_THREE)),
]


@pytest.fixture(scope="module")
def launches(request):
    @functools.cache
    def launched(on):
        target = f"{TARGET},tests.training.sharded:{SLOTS_ON_THREE}" if on == ("collective", 3) else TARGET
        return job(*on).run(target, only=spmd.selected(request, on=on), timeout=570)

    return launched


@pytest.mark.parametrize(("on", "case"), CELLS, ids=[f"{engine} on {n}: {name}" for (engine, n), name in CELLS])
def test_case(launches, on, case):
    launches(on).check(case)
