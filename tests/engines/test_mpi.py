"""MPIEngine on 2, 3 and 4 ranks under a real mpirun, and alone."""

import pytest

from tests.helpers import spmd

CONFORMANCE = "tests.engines.conformance"
OWN = "tests.engines.mpi_cases"


@pytest.fixture(scope="module", params=[2, 3, 4])
def conforming(request):
    return spmd.run(CONFORMANCE, request.param, given=f"{OWN}:engine", only=spmd.selected(request))


@pytest.mark.parametrize("case", spmd.names(CONFORMANCE))
def test_conformance(conforming, case):
    conforming.check(case)
