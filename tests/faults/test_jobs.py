"""Jobs that break, a few of the campaign's cells: each engine with each fault and at each moment.

Horovod under mpirun and MPICH are left to the whole campaign: the one's engine is that over Gloo, the other's that over
MPI, and their launchers' ends have tests in `tests/engines`.
"""

import pytest

from tests.faults.cells import few_cells
from tests.helpers import needs

NEEDS = {"mpi": (), "horovod over gloo": needs.horovod, "collective": ()}
CELLS = [pytest.param(cell, marks=NEEDS[cell.engine]) for cell in few_cells(tuple(NEEDS))]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.engine}-{cell.kind}-{cell.moment}")
def test_it_ends_in_time_with_one_message(cell):
    cell.check(cell.run())
