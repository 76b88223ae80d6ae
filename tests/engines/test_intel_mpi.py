"""Training over Intel MPI by `kdist run`, in an environment of its own, and ranks that fail; see `tests/run`."""

import os
import re
from pathlib import Path

import pytest

from tests.faults.cells import Cell
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


@pytest.mark.parametrize(("kind", "moment"), [("raise", "first step"), ("SIGKILL", "epoch")])
def test_a_rank_that_fails_ends_the_job_and_is_named(kind, moment):
    cell = Cell("intel mpi", kind, moment, 1)
    ended = cell.run()
    cell.check(ended)
    assert "kdist: rank 1 " in ended.output.splitlines()[-1] + ended.output.splitlines()[-2], ended.output


def test_what_a_bug_report_needs():
    python = os.environ["KDIST_TEST_INTEL_MPI_PYTHON"]
    env = {"PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"}  # as in an active environment
    said = spmd.launch([python, "-m", "kdist.cli.main", "env"], 2, launcher="mpich", python=python, env=env)
    assert said.returncode == 0, said.output
    for words in ("mpirun +intel_mpi 2021", "launcher +intel_mpi", "rank +1 of 2", "over mpi: started by Intel MPI"):
        assert re.search(words, said.output), said.output
