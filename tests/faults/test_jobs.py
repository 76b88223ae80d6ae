"""Jobs that break, a few of the campaign's cells: something at each moment.

Elsewhere: a rank that is stopped (`tests/test_failures.py`), one that is killed or exits without a word, over each
engine (`tests/transcripts`, `tests/restarts`), and one that raises over Horovod (`tests/launchers/test_horovodrun.py`).

Horovod under mpirun and MPICH are left to the whole campaign: the one's engine is that over Gloo, the other's that over
MPI, and their launchers' ends have tests in `tests/engines`.
"""

import pytest

from tests.faults.cells import FEW
from tests.helpers import needs

CELLS = [pytest.param(cell, marks=needs.horovod if "horovod" in cell.engine else ()) for cell in FEW]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.engine}-{cell.kind}-{cell.moment}")
def test_it_ends_in_time_with_one_message(cell):
    cell.check(cell.run())
