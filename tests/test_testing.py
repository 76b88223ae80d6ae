"""Faults that do not end a job, in one process; on two ranks: `test_scope.py`."""

from tests.helpers import spmd


def test_in_one_process():
    spmd.run("tests.testing_cases", 1).check()
