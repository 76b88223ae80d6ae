"""Asynchronous training: one launch with two workers, one with one; every role leaves with exit code 0."""

import json
import sys

import pytest

from tests.helpers import spmd
from tests.parameter_server import training_cases as script

MODULE = "tests.parameter_server.training_cases"
ANY = [name for name in vars(script) if name.startswith("case_")]
ALONE = [name for name in vars(script) if name.startswith("alone_")]
LIMIT = 280  # seconds; a generous guard, for a machine that is busy with other things


def launched(tmp_path_factory, ranks, cases):
    """Runs cases on the chief of a job that `kdist run` starts; returns their reports by name."""
    directory = tmp_path_factory.mktemp("parameter_server")
    start = [sys.executable, "-m", "kdist.cli.main", "run", "--strategy", "parameter_server", "-np", str(ranks)]
    line = [*start, "--ps", "1", "--output", str(directory), "-m", MODULE, str(directory), *cases]
    done = spmd.execute(line, env=spmd.RANK_ENVIRONMENT, timeout=LIMIT)
    report = directory / "report.jsonl"
    lines = report.read_text().splitlines() if report.exists() else []
    return done, {each["case"]: each for each in map(json.loads, lines)}


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory, request):
    return launched(tmp_path_factory, 4, [case for case in spmd.selected(request) if case in ANY])


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory, request):
    return launched(tmp_path_factory, 3, [case for case in spmd.selected(request) if case in ALONE])


def check(result, case):
    done, reports = result
    assert case in reports, f"not reached, exit code {done.returncode}:\n{done.output[-6000:]}"
    assert reports[case]["error"] is None, reports[case]["error"]
    assert done.returncode == 0, done.output[-6000:]


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("case", ANY)
def test_with_two_workers(two_workers, case):
    check(two_workers, case)


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("case", ALONE)
def test_with_one_worker(one_worker, case):
    check(one_worker, case)
