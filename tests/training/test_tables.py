"""Embedding tables in parts, on 2 ranks over MPI; on 3, and over TensorFlow's collectives: `test_fidelity.py`.

All cases on each number of ranks: `python -m tests.training.full --only tables`.
"""

import pytest

from tests.helpers import spmd
from tests.helpers.jobs import job
from tests.training.tables import CASES, WITH_SHARDED_SLOTS

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
    *(f"{name}_with_sharded_slots" for name in WITH_SHARDED_SLOTS if name != "resumed"),
)
ON_THREE = ("initial_values", "ranks_without_rows")


@pytest.fixture(scope="module")
def launched(request):
    return job("mpi", 2).run(TARGET, only=spmd.selected(request), timeout=570)


@pytest.mark.parametrize("case", [name for name in CASES if name not in SLOW + ON_THREE])
def test_case(launched, case):
    launched.check(case)
