"""Jobs that break, a few of the campaign's cells: each engine with each fault and at each moment."""

import pytest

from tests.faults.cells import few_cells
from tests.helpers import needs

NEEDS = {"mpich": needs.mpich, "horovod over gloo": needs.horovod, "horovod over mpi": needs.horovod}
CELLS = [pytest.param(cell, marks=NEEDS.get(cell.engine, ())) for cell in few_cells()]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.engine}-{cell.kind}-{cell.moment}")
def test_it_ends_in_time_with_one_message(cell):
    cell.check(cell.run())
