"""A job as a child process: exit code, signals, and no process left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kdist.errors import LaunchError
from kdist.launchers import process
from kdist.launchers.command import Command
from tests.helpers import needs, spmd

ROOT = Path(__file__).parents[2]
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Ranks that would stay for long: one deep in MPI, where Python's signal handlers do not run.
STAY = """
import os, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
with open(os.path.join(sys.argv[1], f"pid{world.rank}"), "w") as file: file.write(f"{os.getpid()}\\n")
if world.rank == 0: world.Barrier()
time.sleep(300)
"""
# The same without MPI.
WAIT = """
import os, sys, time
with open(os.path.join(sys.argv[1], f"pid{os.getpid()}"), "w") as file: file.write(f"{os.getpid()}\\n")
time.sleep(300)
"""


def test_the_exit_code_and_the_environment():
    code = "import os, sys; sys.exit(int(os.environ['KDIST_TEST_CODE']))"
    assert process.run(Command((sys.executable, "-c", code), {"KDIST_TEST_CODE": "7"})) == 7


def test_a_launcher_killed_by_a_signal():
    assert process.run(Command((sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))) == 128 + 9


def test_a_signal_after_a_job_that_ended_well_changes_nothing():
    received = []
    with process.started(Command(("sh", "-c", "sleep 2 & exit 0"))) as job:
        threading.Timer(1.0, received.append, [signal.SIGTERM]).start()
        assert job.follow(received) == 0
    assert received == [signal.SIGTERM]


def test_a_launcher_that_cannot_be_started():
    with pytest.raises(LaunchError, match=r"(?s)/no/such/mpirun -np 2.*Fix"):
        process.run(Command(("/no/such/mpirun", "-np", "2")))


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.05)
    return condition()


@contextlib.contextmanager
def started(tmp_path, script, *options, ignored=()):
    """Yields `kdist run` with two running ranks, and their process ids."""
    (tmp_path / "stay.py").write_text(script)
    command = [sys.executable, "-m", "kdist.cli.main", "run", "-np", "2", *options]
    with open(tmp_path / "output", "w") as output:
        running = subprocess.Popen(
            [*command, str(tmp_path / "stay.py"), str(tmp_path)],
            env={**os.environ, **spmd.RANK_ENVIRONMENT},
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: [
                signal.signal(each, signal.SIG_IGN if each in ignored else signal.SIG_DFL) for each in STOPS
            ],
        )
    pids = []

    def found():
        files = sorted(tmp_path.glob("pid*"))
        pids[:] = [int(file.read_text()) for file in files if file.read_text().endswith("\n")]
        return len(pids) == 2

    try:
        assert wait_for(found, 60), (tmp_path / "output").read_text()
        time.sleep(0.5)
        yield running, pids
    finally:
        for pid in [running.pid, *pids]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        running.wait()


@pytest.fixture
def job(tmp_path):
    with started(tmp_path, STAY) as (running, pids):
        yield running, pids


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_ranks(job, number, code, tmp_path):
    running, pids = job
    assert all(map(alive, pids))
    running.send_signal(number)
    assert running.wait(30) == code
    assert wait_for(lambda: not any(map(alive, pids)), 5)
    output = (tmp_path / "output").read_text()
    assert f"kdist: {number.name}: the job has ended" in output
    assert "Traceback" not in output


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["mpi", "collective"])
def test_an_ignored_signal_ends_nothing(tmp_path, strategy):
    """As under `nohup`: a terminal that closes sends SIGHUP."""
    with started(tmp_path, WAIT, "--strategy", strategy, ignored=[signal.SIGHUP]) as (running, pids):
        os.killpg(running.pid, signal.SIGHUP)
        time.sleep(1.5)
        assert running.poll() is None, (tmp_path / "output").read_text()
        assert all(map(alive, pids))
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 143


@pytest.mark.timeout(120)
def test_a_launcher_that_was_killed_leaves_no_ranks(job):
    running, pids = job
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    launcher, *_ = [
        pid for pid in children if b"kdist.launchers.guard" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(int(launcher), signal.SIGKILL)
    assert running.wait(30) == 128 + 9
    assert wait_for(lambda: not any(map(alive, pids)), 10)


def session_directory(pid):
    """Returns where the Open MPI of a rank keeps its files, without the last name."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return os.path.dirname(dict(each.partition("=")[::2] for each in variables)["PMIX_SERVER_TMPDIR"])


@pytest.mark.timeout(120)
def test_kdist_run_that_was_killed_leaves_no_ranks(job, tmp_path):
    running, pids = job
    # Beside the files of other jobs, a later mpirun with the same process id would end with an error.
    assert os.path.basename(session_directory(pids[0])).startswith("kdist-")
    running.kill()
    assert wait_for(lambda: not any(map(alive, pids)), 20)
    assert "`kdist run` was killed" in (tmp_path / "output").read_text()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", [pytest.param("horovod", marks=needs.horovod), "collective"])
def test_other_launchers_leave_no_ranks(tmp_path, strategy):
    with started(tmp_path, WAIT, "--strategy", strategy) as (running, pids):
        if strategy == "horovod":
            assert os.path.basename(session_directory(pids[0])).startswith("kdist-")
        running.kill()
        assert wait_for(lambda: not any(map(alive, pids)), 20)
