"""`kdist run --restarts` with real jobs whose ranks fail."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import needs, spmd
from tests.restarts import resized
from tests.restarts.simulated_hosts import SimulatedHosts
from tests.restarts.trained import LIMIT, causes, run, train
from tests.restarts.training import is_on_standby

QUICK = str(Path(__file__).with_name("quick.py"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    whole = train(tmp_path_factory.mktemp("whole"))
    assert causes(whole.attempts) == [("success", None)]
    assert "started again" not in whole.said
    return whole


def test_copies_in_memory_outlive_the_chief_its_disk_and_the_command(tmp_path, uninterrupted):
    """The last attempt of the first command raises in its first step: what goes on is another command.

    Slots are in parts, and copies whole.
    """
    backup = {"save_freq": "epoch", "memory_freq": 1, "asynchronous": True}
    settings = {"BACKUP_SETTINGS": json.dumps(backup), "IN_PARTS": "1"}
    ways, out = ("kill@0", "raise", "raise@1:1"), tmp_path / "first"
    program = ("-m", "tests.restarts.training", str(tmp_path), *ways)
    options = ("--restarts", "1", "--output", str(out), *program)
    done = run(*options, timeout=4 * LIMIT, env={**settings, "LOSE_DISK": "1"})
    assert done.returncode == 1, done.output
    attempts = json.loads((out / "restarts.json").read_text())["attempts"]
    assert causes(attempts) == [("signal", 0), ("exception", 1), ("exception", 1)]
    assert [each["steps_lost"] for each in attempts] == [0, 0, 0]
    assert attempts[0]["exit_code"] == 137
    assert "OSError: the disk is gone" in (out / "attempt2" / "rank1.err").read_text()
    assert (out / "attempt3" / "rank0.out").exists()
    assert done.output.count("training resumes from the memory of rank 0's host: epoch 1, after 2 step(s)") == 1
    assert "not started again: the start failed: no step was trained" in done.output
    assert not list(Path("/dev/shm").glob("kdist-copies-*"))
    trained = train(tmp_path, *ways, env=settings)
    assert "training resumes from checkpoint-00000002: epoch 1, after 4 step(s)" in trained.said
    assert causes(trained.attempts) == [("success", None)]
    assert trained.said.count("asynchronous=True has no effect with state in parts") == 1
    assert trained.differences(uninterrupted) == []


def test_over_collectives_a_checkpoint_is_written_while_training_goes_on(tmp_path, uninterrupted):
    """Each attempt makes a new checkpoint."""
    settings = json.dumps({"save_freq": 1, "asynchronous": True, "memory_freq": "auto"})
    trained = train(tmp_path, "kill", "preempt", strategy="collective", env={"BACKUP_SETTINGS": settings})
    assert trained.differences(uninterrupted) == []  # of two ranks no order of sums matters
    assert causes(trained.attempts) == [("signal", 1), ("preemption", 1), ("success", None)]
    assert all(each["new_checkpoint"] for each in trained.attempts)
    assert trained.attempts[0]["steps_lost"] <= 2  # that of the step before may not have been written
    assert trained.attempts[1]["steps_lost"] == 0
    assert "3 attempts, the last one ended well" in trained.said
    assert "no backup" not in trained.said


def test_the_ranks_of_the_next_attempt_are_on_standby(tmp_path, uninterrupted):
    """The last attempt's ranks are those that waited: they are older than the end of the first one."""
    trained = train(tmp_path, "late-kill", options=["--standby"])
    assert trained.differences(uninterrupted) == []
    assert causes(trained.attempts) == [("signal", 1), ("success", None)]
    assert trained.said.count("train together over mpi") == 2
    first, last = trained.attempts
    assert first["steps_lost"] <= 1
    started = float((tmp_path / "started1").read_text())
    assert first["began"] < started < last["began"] - 1
    assert not [place for place in Path("/proc").glob("[0-9]*") if is_on_standby(place, tmp_path)]


def test_a_host_is_lost_and_comes_back(tmp_path):
    """On another number of ranks, with `scale_batch=False`, only the order of sums is another."""
    size = ("-H", "localhost:1,beta:1,gamma:1", "--min-np", "2", "--restarts", "1", "--look", "1")
    agent = ("--launcher-args", f"--prtemca plm_ssh_agent {SimulatedHosts(tmp_path).agent()}")
    program = ("--output", str(tmp_path / "out"), "-m", "tests.restarts.elastic", str(tmp_path))
    done = run(*size, *agent, *program, ranks=3, timeout=3 * LIMIT)
    assert done.returncode == 0, done.output[-6000:]
    attempts = json.loads((tmp_path / "out" / "restarts.json").read_text())["attempts"]
    assert causes(attempts) == [("lost", None), ("resize", None), ("success", None)], done.output[-6000:]
    assert [each["ranks"] for each in attempts] == [3, 2, 3]
    assert attempts[0]["host"] == "beta"
    assert attempts[1]["hosts"] == ["localhost", "gamma"]
    assert attempts[1]["steps_lost"] == 0
    assert "2 of at most 3 ranks, on localhost:1,gamma:1: beta does not answer" in done.output
    assert "attempt 2, of 2 ranks: all ranks have saved and left, for a larger job" in done.output
    assert resized.difference(tmp_path, "arrays") < resized.TOLERANCE


def test_a_host_that_is_lost_is_no_success(tmp_path):
    """Open MPI exits with 0, and no rank is on the host of `kdist run`."""
    agent = ("--launcher-args", f"--prtemca plm_ssh_agent {SimulatedHosts(tmp_path).agent()}")
    done = run("-H", "beta:1,gamma:1", *agent, QUICK, "lose", str(tmp_path), timeout=120)
    assert done.returncode == 1, done.output
    assert "kdist: a host was lost, but " in done.output
    assert "kdist: host beta was lost; the job's exit code is 1" in done.output


@pytest.mark.parametrize("launcher", ["collective", pytest.param("mpich", marks=needs.mpich)])
def test_it_ends_without_progress(launcher, tmp_path):
    python = os.environ["KDIST_TEST_MPICH_PYTHON"] if launcher == "mpich" else sys.executable
    strategy = "collective" if launcher == "collective" else "mpi"
    done = run("--restarts", "3", "--strategy", strategy, QUICK, "kill", str(tmp_path), timeout=120, python=python)
    assert done.returncode == 137, done.output
    assert done.output.count("the job is started again") == 1
    assert "no backup was made" not in done.output  # no step was trained
    assert "2 attempts, exit code 137; not started again: 2 attempts have made no new checkpoint" in done.output
    assert done.output.count("was killed by signal 9 (SIGKILL); the job is started again") == 1
    assert done.output.count("was killed by signal 9 (SIGKILL); lost 0 steps and") == 2


def test_a_start_that_fails_is_not_repeated(tmp_path):
    done = run("--restarts", "3", "--output", str(tmp_path / "out"), QUICK, "import", str(tmp_path), timeout=120)
    assert done.returncode == 1, done.output
    assert "started again, attempt" not in done.output
    summary = json.loads((tmp_path / "out" / "restarts.json").read_text())
    assert [each["cause"] for each in summary["attempts"]] == ["exception"]
    assert "no_such_module" in summary["attempts"][0]["message"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_kdist_run_ends_the_job(number, tmp_path):
    command = [sys.executable, "-m", "kdist.cli.main", "run", "-np", "2", "--restarts", "3", QUICK, "wait"]
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen([*command, str(tmp_path)], stderr=said, start_new_session=True)
    try:
        files = [tmp_path / f"pid{rank}" for rank in (0, 1)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        process.send_signal(number)
        code = process.wait(60)
        wait_until(lambda: not any(Path("/proc", file.read_text()).exists() for file in files))
    finally:
        process.kill()
        process.wait()
    if number is signal.SIGTERM:
        assert code == 143
        assert (
            "1 attempt, exit code 143; not started again: kdist run was asked to end" in (tmp_path / "said").read_text()
        )


@pytest.mark.parametrize("options", [("--restarts", "3"), ("-H", "beta:1,localhost:1")])
def test_ranks_save_and_leave_at_a_notice_to_kdist_run(options, tmp_path):
    """As Slurm's `--signal=USR1@120` sends it to a batch script's commands. Afterwards nothing is started again."""
    if options[:1] == ("-H",):  # rank 0 is on another host
        options += ("--launcher-args", f"--prtemca plm_ssh_agent {SimulatedHosts(tmp_path).agent()}")
    command = [sys.executable, "-m", "kdist.cli.main", "run", "-np", "2", *options, "-m", "tests.restarts.training"]
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(
            [*command, str(tmp_path), "wait"], stderr=said, env={**os.environ, **spmd.RANK_ENVIRONMENT}
        )
    try:
        wait_until(lambda: (tmp_path / "waits").exists())
        process.send_signal(signal.SIGUSR1)
        code = process.wait(120)
    finally:
        process.kill()
        process.wait()
    text = (tmp_path / "said").read_text()
    assert code == 75, text
    assert "SIGUSR1 to `kdist run`: saved after step" in text
    assert "started again, attempt" not in text


def test_parameter_servers_and_no_restarts_are_refused(tmp_path):
    done = run("--restarts", "3", "--strategy", "parameter_server", QUICK, "wait", str(tmp_path), timeout=60, ranks=3)
    assert done.returncode == 2
    assert "lost workers are started again by themselves" in done.output
    done = run("--restarts", "0", QUICK, "wait", str(tmp_path), timeout=60)
    assert done.returncode == 2
    assert "--restarts is not positive" in done.output


def test_standby_needs_restarts(tmp_path):
    done = run("--standby", QUICK, "wait", str(tmp_path), timeout=60)
    assert done.returncode == 2
    assert "--standby has no effect without --restarts" in done.output


def wait_until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
