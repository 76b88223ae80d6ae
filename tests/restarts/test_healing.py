"""`kdist run --heal in-process` with real jobs whose ranks are killed."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdist.cli.jobs import healed
from kdist.healing.process_snapshot import ProcessSnapshot
from kdist.restarts import progress
from kdist.restarts.attempt import Attempt, End
from kdist.restarts.events import Events, Healing, Kind, own_reports, read_events
from kdist.restarts.summary import as_values, in_words
from tests.restarts.trained import causes, heal, healings

HEALING = Healing((2,), (3,), 2, "here", began=20.0, steps_lost=3, saved=15.0)


def processes(folder, number):
    """Returns the process ids of the ranks of a run of the script."""
    files = sorted(folder.glob(f"run{number}.rank*"))
    return [int(file.read_text()) for file in files]


def test_ranks_go_on_in_their_processes(tmp_path):
    """One is killed in the midst of an epoch, then rank 0 while it saves. No process is started again."""
    said, attempts = heal(tmp_path, "kill@3:5", "saving@0", ranks=4, restarts=2)
    assert causes(attempts) == [("success", None)], said[-6000:]
    assert healings(attempts) == [[([3], 3), ([0], 2)]]
    [attempt] = attempts
    assert [each["cause"] for each in attempt["healings"]] == ["signal", "signal"]
    assert all(0 <= each["steps_lost"] <= 2 and each["seconds_lost"] > 0 for each in attempt["healings"])
    first, second, third = (processes(tmp_path, number) for number in range(3))
    assert second == first[:3]
    assert third == second[1:]
    assert "started again, attempt" not in said
    assert "rank 3 on host" in said
    assert "1 attempt, which ended well\n  attempt 1: rank 3 on host" in said
    # What the next rank 0 prints is shown from then on, and stands in the file of its first number.
    assert [f"run {number} of {4 - number} ranks" in said for number in range(3)] == [True] * 3
    own = (tmp_path / "out" / "attempt1" / "rank1.out").read_text()
    assert own.splitlines() == [f"run {number} of {4 - number} ranks" for number in range(3)]


@pytest.mark.timeout(1200)
def test_what_cannot_be_healed_is_started_again(tmp_path):
    """The chief is lost, and is resumed from memory; then a rank while the others open their scope. One is not enough.

    In the next attempt a rank is stopped, which MPI does not see.
    """
    settings = json.dumps({"save_freq": "epoch", "memory_freq": 1})
    env = {"BACKUP_SETTINGS": settings, "KDIST_STALL_TIMEOUT": "30"}
    said, attempts = heal(tmp_path, "kill@0:5", "start@1", "kill@1", "stop@2", ranks=4, restarts=2, env=env)
    assert causes(attempts) == [("signal", 1), ("stall", 2), ("success", None)], said[-6000:]
    assert healings(attempts) == [[([0], 3), ([1], 2)], [], []]
    assert [each["steps_lost"] for each in attempts[0]["healings"]] == [0, 0]
    assert said.count("training resumes from the memory of rank 0's host") == 3
    assert (
        "was killed, and the others cannot go on in their processes: of at least 2 ranks 1 is left; the job is started "
        "again, attempt 2" in said
    )
    assert "rank3.err, that of the other ranks beside it" in said  # the last rank 1 of the first attempt
    assert "MPI_ABORT" not in said


@pytest.fixture
def ended():
    """The id of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_rank_that_is_gone_ends_the_job_after_a_while(tmp_path, ended, monkeypatch, capfd):
    (tmp_path / "0").write_text(str(os.getpid()))
    (tmp_path / "1").write_text(str(ended))
    (tmp_path / "2").touch()  # it is about to write its number
    watch, clock = healed.Watch(str(tmp_path)), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    assert not watch.has_problem()
    clock[0] += 14
    assert not watch.has_problem()
    clock[0] += 2
    assert watch.has_problem()
    [failure] = read_events(str(tmp_path)).failures
    assert (failure.kind, failure.rank) == (Kind.LOST, 1)
    assert "rank 1 was lost, and the others did not go on without it within 15 s" in capfd.readouterr().err


def test_a_rank_that_the_others_go_on_without_is_told_once(tmp_path, ended, monkeypatch, capfd):
    (tmp_path / "3").write_text(str(ended))
    watch, clock = healed.Watch(str(tmp_path)), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    assert not watch.has_problem()
    monkeypatch.setattr(own_reports, "directory", tmp_path)
    own_reports.healed(HEALING)
    clock[0] += 1000
    assert not watch.has_problem()
    assert not watch.has_problem()
    assert capfd.readouterr().err.count("rank 2 on host here was killed, and 2 ranks went on") == 1
    assert watch.lost == {3}
    assert watch.code(0) == 0


def test_mpirun_reports_success_although_a_rank_was_lost(tmp_path, ended, capfd):
    (tmp_path / "1").write_text(str(ended))
    watch = healed.Watch(str(tmp_path))
    assert watch.code(5) == 5
    assert watch.code(0) == 1
    assert read_events(str(tmp_path)).failures[0].kind is Kind.LOST
    assert "rank 1 was lost, but mpirun reported success" in capfd.readouterr().err


def test_the_next_step_ends_a_healing(tmp_path, monkeypatch):
    monkeypatch.setattr(own_reports, "directory", tmp_path)
    own_reports.made_step()
    own_reports.healed(HEALING)
    assert read_events(str(tmp_path)).healings == (HEALING,)
    before = time.time()
    own_reports.made_step()
    own_reports.made_step()
    [found] = read_events(str(tmp_path)).healings
    assert before <= found.went_on <= time.time()


def test_the_summary_tells_of_each_healing():
    found = dataclasses.replace(HEALING, went_on=24.0)
    attempt = Attempt(End.WELL, 0, 10.0, 30.0, Events({}, True, (), None, healings=(found,)))
    assert in_words([attempt], "") == (
        "1 attempt, which ended well\n  attempt 1: rank 2 on host here was killed, and 2 ranks went on; lost 3 steps "
        "and 9 s"
    )
    values = as_values([attempt], "", 2)
    assert (values["steps_lost"], values["seconds_lost"]) == (3, 9.0)
    assert values["attempts"][0]["healings"][0]["ranks_lost"] == [2]


def test_progress_goes_on_with_the_next_chief(tmp_path, monkeypatch):
    monkeypatch.setattr(own_reports, "directory", tmp_path)
    chief, other = progress.OwnProgress(), progress.OwnProgress()
    chief.fit_begins()
    chief.made_steps(4)
    chief.saved(0, 4, 4, 1)
    chief.made_steps(3)
    steps_lost, saved = other.begin_again(is_chief=True)
    assert (steps_lost, saved > 0) == (3, True)
    other.fit_begins()
    other.made_steps(1)
    found = progress.read(str(tmp_path), read_events(str(tmp_path)))
    assert (found.fits, found.steps, found.place) == (1, 1, (1, 0, 4))


def test_a_script_finds_its_process_as_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    fresh, path = ProcessSnapshot(), list(sys.path)
    folder = tmp_path / "scripts"
    folder.mkdir()
    Path(folder, "a_module_of_the_scripts.py").write_text("")
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    import a_module_of_the_scripts  # noqa: F401

    fresh.restore()
    assert "a_module_of_the_scripts" not in sys.modules
    assert {"json", "pytest", "kdist"} <= set(sys.modules)
    assert sys.path == path
    assert Path.cwd() == tmp_path
