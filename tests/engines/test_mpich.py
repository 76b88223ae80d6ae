"""MPIEngine, and training over it, under MPICH, which needs an environment of its own: both MPIs install `bin/mpirun`.

`KDIST_TEST_MPICH_PYTHON` names the interpreter of a virtual environment made by `tests/run`, or by::

    python -m venv ENV && ENV/bin/pip install keras tensorflow mpi4py mpich pytest hypothesis
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.conformance import SWEEPS
from tests.helpers import needs, spmd

OWN = "tests.engines.mpi_cases"
CASES = f"tests.engines.conformance,{OWN},tests.training.all_cases:CASES"
TRAINING = "adam-few-tf_data"  # no MPI knows of more; `python -m tests.training.full --engines mpich`
PYTHON = os.environ.get("KDIST_TEST_MPICH_PYTHON", "")

pytestmark = needs.mpich


def test_this_is_mpich():
    mpirun = Path(PYTHON).parent / "mpirun"
    assert "HYDRA" in subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60).stdout


@pytest.fixture(scope="module")
def launched(request):
    return spmd.run(CASES, 2, given=f"{OWN}:engine", only=spmd.selected(request), python=PYTHON)


ENGINE = [case for case in spmd.names(CASES) if case.startswith("case_") and case not in SWEEPS]


@pytest.mark.parametrize("case", [*ENGINE, TRAINING])
def test_case(launched, case):
    launched.check(case)


def test_abort_ends_all_ranks_with_the_code():
    ended = spmd.launch([PYTHON, "-c", f"from {OWN} import aborts; aborts()"], 2, timeout=40, python=PYTHON)
    assert not ended.timed_out
    assert ended.returncode == 5
    assert "last words" in ended.output
