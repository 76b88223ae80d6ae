"""This process among the others, on real ranks and alone."""

from __future__ import annotations

import json

import pytest

import kdist
from kdist import _process
from kdist.errors import ScopeError
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


def test_a_barrier_of_parameter_servers_is_refused(monkeypatch):
    cluster = {"chief": ["a:1"], "worker": ["a:2"], "ps": ["a:3"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    monkeypatch.setattr(_process, "_opened", _process._Opened())  # another test may have opened this process's engine
    with pytest.raises(ScopeError, match="no collectives"):
        kdist.barrier()
