"""Training over Intel MPI by `kdist run`, in an environment of its own; see `tests/run`."""

import pytest

from tests.helpers import needs, spmd
from tests.helpers.jobs import job

TRAINING = "tests.training.all_cases:CASES"

pytestmark = needs.intel_mpi


@pytest.fixture(scope="module")
def training(request):
    return job("intel mpi", 2).run(TRAINING, only=spmd.selected(request, "trained"), timeout=300)


@pytest.mark.parametrize("trained", ["adam-few-tf_data"])
def test_training(training, trained):
    training.check(trained)
    assert "2 ranks train together over mpi, started by Intel MPI" in training.outputs[0]
