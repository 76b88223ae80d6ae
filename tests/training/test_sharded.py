"""`shard="optimizer"`: its own cases, and features of the fidelity suite with it. All: `full.py --only sharded`."""

import functools

import pytest

from tests.helpers import spmd
from tests.helpers.jobs import job as make_job
from tests.training.sharded import CASES

TARGET = "tests.training.sharded:SHARDED"

FEATURES = (
    "clipping",
    "moving_average_of_weights",
    "constraints",
    "two_optimizers",
    "loss_scale",
    "gradient_accumulation",
    "custom_train_step",
    "jit_compile",
    "adamw-few-py_dataset",
)

SLOW = ("other_optimizers", "a_file_that_one_rank_loads_is_refused", "decay_that_leaves_weights_out")
ON_THREE = ("sparse_gradients",)

CELLS = [
    *((("mpi", 2), name) for name in (*CASES, *FEATURES) if name not in SLOW + ON_THREE),
    *((("collective", 3), name) for name in ON_THREE),
]


@pytest.fixture(scope="module")
def launches(request):
    """Launches each job once, with the cases that are asked for."""

    @functools.cache
    def launched(job):
        return make_job(*job).run(TARGET, only=spmd.selected(request, job=job), timeout=570)

    return launched


@pytest.mark.parametrize(
    ("job", "case"), CELLS, ids=[f"{engine} on {ranks}: {name}" for (engine, ranks), name in CELLS]
)
def test_case(launches, job, case):
    launches(job).check(case)
