"""Jobs that break, a few of the campaign's cells: each engine with each fault and at each moment.

Horovod under mpirun is left to the whole campaign: its engine is that over Gloo, and mpirun ends its jobs as MPI's.
"""

import pytest

from tests.faults.cells import few_cells
from tests.helpers import needs

NEEDS = {"mpi": (), "mpich": needs.mpich, "horovod over gloo": needs.horovod, "collective": ()}
CELLS = [pytest.param(cell, marks=NEEDS[cell.engine]) for cell in few_cells(tuple(NEEDS))]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.engine}-{cell.kind}-{cell.moment}")
def test_it_ends_in_time_with_one_message(cell):
    cell.check(cell.run())
