"""HorovodEngine under mpirun with MPI and under horovodrun with Gloo, and each way in which it is not there."""

import functools
import importlib.util
import json
import os
import shutil
import sys
import types
from pathlib import Path

import pytest

from kdist.errors import EngineNotFoundError
from tests.engines.conformance import SWEEPS
from tests.helpers import needs, spmd

pytestmark = needs.horovod

OWN = "tests.engines.horovod_cases"
CASES = f"tests.engines.conformance,{OWN}"
GLOO, MPI = "horovodrun_gloo", "mpirun"


# Over Gloo, messages of groups go over the network, and over MPI through shared memory; all else is one engine.
JOBS = [(2, MPI, "engine"), (3, GLOO, "engine_over_the_network")]
OVER_MPI = [*spmd.names(OWN), *SWEEPS, "case_whether_ranks_share_memory"]
CELLS = [
    *((JOBS[0], case) for case in spmd.names(CASES) if case in OVER_MPI),
    *((JOBS[1], case) for case in spmd.names(CASES) if case not in SWEEPS),
]


@pytest.fixture(scope="module")
def launches(request):
    @functools.cache
    def launched(job):
        ranks, launcher, made = job
        only = spmd.selected(request, job=job)
        return spmd.run(CASES, ranks, given=f"{OWN}:{made}", only=only, launcher=launcher, timeout=240)

    return launched


@pytest.mark.parametrize(("job", "case"), CELLS, ids=str)
def test_case(launches, job, case):
    launched = launches(job)
    launched.check(case)
    if case == "case_whether_ranks_share_memory":  # those of MPI do, and those of Gloo test the other way
        assert launched.values(case) in ([True] * 2, [False] * 3)


def test_a_rank_that_ends_early_waits_for_the_others():
    """Over Gloo: over MPI, Horovod's own thread is never idle."""
    result = spmd.run(f"{OWN}:ends_early_and_waits", 2, launcher=GLOO, timeout=90)
    _, burnt = result.values("ends_early_and_waits")
    result.check()
    assert burnt < 1.0, "of 2 seconds of waiting"


def test_horovods_thread_leaves_its_core_unless_the_user_says_otherwise():
    result = spmd.run(f"{OWN}:says_whether_open_mpi_yields", 2, timeout=90)
    assert result.values("says_whether_open_mpi_yields") == [True, False]


@pytest.mark.parametrize("case", ["initialises_mpi_first", "initialises_mpi_second"])
def test_horovod_and_mpi4py_in_one_process_end_cleanly(case):
    spmd.run(f"{OWN}:{case}", 2, timeout=90).check()


# Horovod's own settings, and the end of a job under mpirun.


def test_horovods_timeline_and_stall_check_work_and_a_rank_that_aborts_ends_all(tmp_path):
    timeline = tmp_path / "timeline.json"
    env = {"HOROVOD_TIMELINE": str(timeline), "HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "TF_CPP_MIN_LOG_LEVEL": "0"}
    script = f"from {OWN} import keeps_the_others_waiting_and_aborts as f; f()"
    ended = spmd.launch([sys.executable, "-c", script], 2, env=env, timeout=90)
    assert not ended.timed_out, ended.output
    assert ended.returncode == 5, ended.output
    assert "last words" in ended.output
    assert "Missing ranks:" in ended.output
    assert "ALLREDUCE" in timeline.read_text()


# What it is not there for.

SCRIPT = """
import os, kdist
from kdist._engine import open_engine
try:
    print(open_engine(kdist.cluster_info(), "horovod"))
except (ImportError, ValueError) as err:
    print(f"{type(err).__name__}: {err}")
"""


def said_by_a_rank(script=SCRIPT, env=None, before="", ranks=1):
    ended = spmd.launch([sys.executable, "-c", before + script], ranks, env=env, timeout=90)
    assert not ended.timed_out, ended.output
    return ended.output


def test_a_missing_horovod_is_an_error_that_names_the_command():
    said = said_by_a_rank(before="import sys; sys.modules['horovod'] = None\n")
    assert "EngineNotFoundError: Horovod is not installed" in said
    assert "kdist install-horovod" in said


@pytest.fixture
def copy(tmp_path):
    """A Horovod of which parts can be taken away, and the variables that make it the first one to be found."""
    here = Path(importlib.util.find_spec("horovod").submodule_search_locations[0])
    there = tmp_path / "horovod"
    shutil.copytree(here, there, ignore=shutil.ignore_patterns("__pycache__", "torch", "spark", "ray", "mxnet"))
    return there, {"PYTHONPATH": os.pathsep.join((str(tmp_path), spmd.LEAN["PYTHONPATH"]))}


def test_a_horovod_without_tensorflow_is_named(copy):
    there, env = copy
    for library in (there / "tensorflow").glob("mpi_lib*.so"):
        library.unlink()
    said = said_by_a_rank(env=env)
    assert "EngineNotFoundError: Horovod was built without TensorFlow" in said
    assert "kdist install-horovod --force" in said


def test_a_horovod_for_another_tensorflow_is_named(copy):
    there, env = copy
    (library,) = (there / "tensorflow").glob("mpi_lib*.so")
    binary = library.read_bytes()
    symbol = b"_ZN10tensorflow"
    assert symbol in binary
    library.write_bytes(binary.replace(symbol, b"_ZN10tensorflaw"))
    (there / "metadata.json").write_text(json.dumps({"tensorflow": "2.9.1"}))
    said = said_by_a_rank(env=env)
    assert "EngineNotFoundError: Horovod does not load: it was built for another TensorFlow" in said
    assert "2.9.1" in said
    assert "kdist install-horovod --force" in said


def test_a_horovod_without_the_controller_is_named():
    from kdist.engines.horovod import _check_controller

    gloo_alone = types.SimpleNamespace(mpi_built=lambda: 0, gloo_built=lambda: 1)
    with pytest.raises(EngineNotFoundError, match="(?s)job that needs 'mpi' and a Horovod with gloo.*--gloo"):
        _check_controller(gloo_alone, "mpi")
    _check_controller(gloo_alone, None)


def test_another_size_than_the_launchers_is_refused():
    said = said_by_a_rank(env={"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}, ranks=2)
    assert "ClusterError: The launcher and the engine 'horovod' have different numbers of ranks" in said
