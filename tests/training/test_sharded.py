"""`shard="optimizer"`: its own cases, and features of the fidelity suite with it. All: `full.py --only sharded`."""

import pytest

from tests.helpers import spmd
from tests.helpers.jobs import job
from tests.training.sharded import CASES

TARGET = "tests.training.sharded:SHARDED"

FEATURES = (
    "clipping",
    "moving_average_of_weights",
    "two_optimizers",
    "loss_scale",
    "a_step_that_returns_the_loss_that_it_scales",
    "custom_train_step",
    "gradient_accumulation",
    "adamw-few-py_dataset",
)

SLOW = ("other_optimizers", "a_file_that_one_rank_loads_is_refused", "decay_that_leaves_weights_out")
ON_THREE = ("sparse_gradients",)  # which test_fidelity.py launches


@pytest.fixture(scope="module")
def launched(request):
    return job("mpi", 2).run(TARGET, only=spmd.selected(request), timeout=570)


@pytest.mark.parametrize("case", [name for name in (*CASES, *FEATURES) if name not in SLOW + ON_THREE])
def test_case(launched, case):
    launched.check(case)
