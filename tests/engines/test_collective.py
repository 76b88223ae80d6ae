"""CollectiveEngine on 1 to 4 workers of a TF_CONFIG cluster, and when one of them is missing."""

from __future__ import annotations

import functools
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdist.launchers.local_cluster import configurations
from tests.engines.conformance import GROUPS, SWEEPS
from tests.helpers import spmd

CONFORMANCE = "tests.engines.conformance"
OWN = "tests.engines.collective_cases"
ROOT = Path(__file__).parents[2]
LIMIT = 90  # seconds; a generous guard


# On two ranks what goes through memory that they share, on three what goes over the network; groups are tested on four.
JOBS = [(2, "engine"), (3, "engine_over_the_network")]
SHARED = ("large", "bit", "halves", "reduce_scatter", "known_lengths", "slices")
ON_TWO = [case for case in spmd.names(CONFORMANCE) if case in SWEEPS or any(word in case for word in SHARED)]
CELLS = [
    *((JOBS[0], case) for case in ON_TWO if case not in GROUPS),
    *((JOBS[1], case) for case in spmd.names(CONFORMANCE) if case not in (*SWEEPS, *GROUPS)),
]


@pytest.fixture(scope="module")
def launches(request):
    @functools.cache
    def launched(job):
        ranks, made = job
        only = spmd.selected(request, job=job)
        return spmd.run(CONFORMANCE, ranks, given=f"{OWN}:{made}", only=only, launcher="local_cluster", timeout=300)

    return launched


@pytest.mark.parametrize(("job", "case"), CELLS, ids=str)
def test_conformance(launches, job, case):
    launches(job).check(case)


@pytest.fixture(scope="module")
def four(request):
    only = spmd.selected(request, "case_of_groups")
    return spmd.run(CONFORMANCE, 4, given=f"{OWN}:engine", only=only, launcher="local_cluster", timeout=300)


@pytest.mark.parametrize("case_of_groups", GROUPS)
def test_groups(four, case_of_groups):
    four.check(case_of_groups)


@pytest.fixture(scope="module", params=[1, 2])
def own(request):
    only = spmd.selected(request, "own_case")
    return spmd.run(OWN, request.param, given=f"{OWN}:engine", only=only, launcher="local_cluster")


@pytest.mark.parametrize("own_case", spmd.names(OWN))
def test_own(own, own_case):
    own.check(own_case)


def start(config, lines):
    """Starts one worker, without a launcher that would end it when another one fails."""
    environment = {**spmd.RANK_ENVIRONMENT, "TF_CONFIG": config}
    code = f"from {OWN} import *; {lines}"
    # Through `env`, so that what else the tests' own process has stays.
    settings = [f"{name}={value}" for name, value in environment.items()]
    return subprocess.Popen(
        ["env", *settings, sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said(process):
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"still running after {LIMIT} s:\n{output}")
    return output


@pytest.fixture
def pair():
    started = []

    def run(lines, np=2):
        started.extend(start(config, lines) for config in configurations(np))
        return started

    yield run
    for process in started:
        process.kill()
        process.wait()


def test_a_rank_that_ends_early_waits_for_the_others_and_all_end_quietly(pair):
    for process in pair("ends_early()"):
        output = said(process)
        assert process.returncode == 0, output
        assert not any(word in output for word in ("Traceback", "UNAVAILABLE", "ollective")), output


def test_a_worker_that_never_appears_is_named_with_its_address(pair):
    config, _ = configurations(2)
    missing = config.split('"worker": [')[1].split('"')[3]
    started = time.monotonic()
    process = start(config, "stays_alone()")
    output = said(process)
    assert process.returncode == 1
    assert f"rank 1 at {missing} (" in output, output
    assert "within 2 s" in output
    assert time.monotonic() - started < LIMIT


@pytest.mark.parametrize(
    ("action", "words"),
    [("dies", " has ended"), ("stops", "no answer from rank 1 within 10 s")],
)
def test_a_peer_that_is_gone_ends_the_others(pair, action, words):
    said_by_the_first(pair(f"goes_on_until_a_peer_is_gone({action!r}, 4)"), action, words)


@pytest.mark.parametrize(("of", "length"), [("group", 20000), ("message", 4)])  # by shared memory, by the network
def test_so_it_is_in_a_group_and_between_two_ranks(pair, of, length):
    output = said(pair(f"waits_in_a_group({of!r}, {length})", 3)[0])
    assert "A collective failed on rank 0 of 3. Received: rank 2 at 127.0.0.1:" in output, output
    assert " has ended" in output


def said_by_the_first(started, action, words):
    first, second = started
    output = said(first)
    assert first.returncode == 1, output
    assert "went on" in output
    assert f"follows from another rank's end: {action == 'dies'}" in output, output
    assert (
        f"A collective failed on rank 0 of 2. Received: {'rank 1 at 127.0.0.1:' if action == 'dies' else ''}" in output
    )
    assert words in output
    second.kill()


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        config = configurations(1)[0].split('["')[0] + f'["{taken}"]}}, "task": {{"type": "worker", "index": 0}}}}'
        process = start(config, "engine()")
        output = said(process)
    assert process.returncode == 1
    assert f"server does not start on rank 0 of 1. Received for {taken}" in output, output


def test_what_would_be_lost_is_refused():
    process = start(configurations(1)[0], "made_something_before()")
    output = said(process)
    assert process.returncode == 1
    assert "1 ResourceVariable" in output, output
    assert "1 OwnedIterator" in output
    assert "tensors are kept" in output


def test_datasets_that_are_older_than_the_cluster_are_read(pair):
    for output in map(said, pair("reads_datasets_that_are_older_than_the_cluster()")):
        assert "all were read" in output, output


def test_under_mpirun_and_an_abort_that_ends_the_job():
    code = f"from {OWN} import over_addresses_of_mpi; over_addresses_of_mpi()"
    ended = spmd.launch([sys.executable, "-c", code], 2, timeout=LIMIT)
    assert not ended.timed_out, ended.output
    assert ended.returncode == 5, ended.output
