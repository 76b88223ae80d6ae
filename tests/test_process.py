"""This process among the others, on real ranks and alone."""

from __future__ import annotations

import pytest

import kdist
from tests.helpers import spmd

TARGET = "tests.process_cases"


@pytest.fixture(scope="module", params=[3])
def launched(request):
    return spmd.run(TARGET, request.param, only=spmd.selected(request))


@pytest.mark.parametrize("case", spmd.names(TARGET))
def test_case(launched, case):
    launched.check(case)


def test_alone_nothing_waits():
    assert (kdist.rank(), kdist.size(), kdist.is_chief()) == (0, 1, True)
    kdist.barrier()
    with kdist.chief_first():
        pass
