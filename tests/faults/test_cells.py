"""The campaign's matrix, and that its checks can fail."""

import itertools

import pytest

from tests.faults.cells import FEW, KINDS, MOMENTS, Cell, all_cells, covering_cells
from tests.helpers.jobs import ENGINES
from tests.helpers.spmd import Finished

KILLED = Cell("mpi", "SIGKILL", "epoch", 1)
EXITED = Cell("mpi", "sys.exit 3", "epoch", 1)
RAISED = Cell("mpi", "raise", "epoch", 1)
UNKNOWN = Cell("mpi", "SIGSTOP", "start", 1)
ENDED = Cell("mpi", "sys.exit 0", "end", 1)
RIGHT = "[kdist] rank 1 of 2 on host here raised\nValueError: broken on purpose"


def ended(returncode=1, output=RIGHT, timed_out=False):
    return Finished(returncode, output, timed_out, seconds=1.0)


def test_there_are_many_cells_and_each_is_another():
    cells = all_cells()
    assert len(set(cells)) == len(cells) >= 150


def test_every_two_of_an_engine_a_fault_and_a_moment_meet():
    met = {
        pair
        for cell in covering_cells()
        for pair in itertools.combinations((("e", cell.engine), ("k", cell.kind), ("m", cell.moment)), 2)
    }
    factors = [[("e", each) for each in ENGINES], [("k", each) for each in KINDS], [("m", each) for each in MOMENTS]]
    assert met == {pair for two in itertools.combinations(factors, 2) for pair in itertools.product(*two)}
    assert {cell.rank for cell in covering_cells()} == {0, 1}


def test_in_ci_something_breaks_at_each_moment():
    assert [cell.moment for cell in FEW] == list(MOMENTS)
    assert {cell.engine for cell in FEW} < set(ENGINES)
    assert {cell.kind for cell in FEW} < set(KINDS)
    assert {cell.rank for cell in FEW} == {0, 1}


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        (KILLED, ended(137)),
        (EXITED, ended(3)),
        (RAISED, ended()),
        (ENDED, ended(0, "")),
        (UNKNOWN, ended(1, "not all ranks")),
    ],
)
def test_what_must_come_of_a_fault_passes(cell, found):
    cell.check(found)


@pytest.mark.parametrize(
    ("cell", "found", "complaint"),
    [
        (KILLED, ended(-9, timed_out=True), "hung"),
        (KILLED, ended(0), "exit code 0"),
        (KILLED, ended(137, "rank 0 has gone, and rank 10 too"), "rank 1 is not named"),
        (EXITED, ended(1), "expected 3"),
        (RAISED, ended(output=f"{RIGHT}\n{RIGHT}"), "printed 2 times"),
        (RAISED, ended(output="[kdist] rank 1 of 2"), "printed 0 times"),
        (ENDED, ended(1), "expected 0"),
        (KILLED, ended(1, "Not all ranks appeared: rank 0 waits"), "rank 1 is not named"),
    ],
)
def test_what_must_not_come_of_it_does_not_pass(cell, found, complaint):
    with pytest.raises(AssertionError, match=complaint):
        cell.check(found)
