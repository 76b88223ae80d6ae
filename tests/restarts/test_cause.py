"""Why an attempt ended, from what ranks and launchers report of it."""

import dataclasses
import os
import time

import pytest

from kdist.cli.jobs.watched import Watched
from kdist.launchers.hosts.capacity import Placement
from kdist.launchers.hosts.host import Host
from kdist.restarts import progress
from kdist.restarts.attempt import End, cause
from kdist.restarts.event_lines import EventLines
from kdist.restarts.events import Events, Failure, Kind, OwnReports, append_failure, read_events
from kdist.restarts.rules import decide
from tests.callbacks.full_disk import full_disk

# What Open MPI 5 and horovodrun over Gloo wrote.
MPIRUN_KILLED = """\
prterun noticed that process rank 1 with PID 28282 on node beta exited on
signal 9 (Killed).
"""
MPIRUN_EXITED = """\
  Process name: [prterun-alpha-1@1,1]
  Exit code:    5
"""
MPIRUN_LOST = """\
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-alpha-1@0,0] on node alpha
  Remote daemon: [prterun-alpha-1@0,1] on node beta
"""
HOROVODRUN = """\
Process name: 1
Exit code: 137
"""

SIGNAL = Failure(Kind.SIGNAL, "killed", 1, "beta", from_launcher=True)
EXIT = Failure(Kind.EXIT, "exited", 1, "beta", from_launcher=True)
RAISED = Failure(Kind.EXCEPTION, "raised", 1, "beta")
FOLLOWS = Failure(Kind.EXCEPTION, "broken pipe", 0, "alpha", is_consequence=True)
LOST = Failure(Kind.LOST, "died", 1)
STALL = Failure(Kind.STALL, "sends no heartbeat", 1)
PREEMPTED = Failure(Kind.PREEMPTION, "saved", 1, "beta")
LEFT = Failure(Kind.EXIT, "exited with code 75", 0, "alpha")


@pytest.mark.parametrize(
    ("failures", "code", "said", "kind", "rank"),
    [
        ([RAISED, EXIT], 1, "", Kind.EXCEPTION, 1),
        ([EXIT, RAISED], 1, "", Kind.EXCEPTION, 1),
        ([RAISED], 1, MPIRUN_EXITED, Kind.EXCEPTION, 1),
        ([FOLLOWS, SIGNAL], 137, "", Kind.SIGNAL, 1),
        ([FOLLOWS], 137, MPIRUN_KILLED, Kind.SIGNAL, 1),
        ([LOST], 137, MPIRUN_KILLED, Kind.SIGNAL, 1),
        ([LOST], 1, "", Kind.LOST, 1),
        ([LOST, EXIT], 5, "", Kind.EXIT, 1),  # `os._exit(5)`, and rank 0 saw it before the launcher ended it
        ([LOST], 5, MPIRUN_EXITED, Kind.EXIT, 1),
        ([FOLLOWS, LOST], 5, MPIRUN_EXITED, Kind.EXIT, 1),
        ([LOST, dataclasses.replace(LOST, rank=0)], 1, MPIRUN_EXITED, Kind.LOST, 1),  # the link between their hosts
        ([FOLLOWS], 1, "", Kind.LOST, None),
        ([STALL, EXIT], 1, "", Kind.STALL, 1),
        ([PREEMPTED, LEFT], 75, "", Kind.PREEMPTION, 1),
        ([], 5, MPIRUN_EXITED, Kind.EXIT, 1),
        ([], 1, MPIRUN_LOST, Kind.LOST, None),
        ([], 1, HOROVODRUN, Kind.SIGNAL, 1),
        ([], 139, "", Kind.SIGNAL, None),
    ],
)
def test_the_cause(failures, code, said, kind, rank):
    found = cause(Events({1: "beta"}, True, tuple(failures), None), code, said, "")
    assert found is not None
    assert (found.kind, found.rank) == (kind, rank)
    assert found.host == "beta" or kind in (Kind.LOST, Kind.SIGNAL)
    if said == MPIRUN_LOST:
        assert found.host == "beta"
    if kind is Kind.SIGNAL and rank is None:
        assert found.text == "the launcher, or a rank that it did not name, was killed by signal 11 (SIGSEGV)"


def attempt_of(events, code, **how):
    watched = Watched([], **how)
    watched.events = events
    return watched.attempt(code, 0.0, None)


def test_a_rank_that_has_not_told_its_host_is_not_taken_to_be_on_this_one():
    """A rank on another host tells it by its standard error, which is shown when it fails."""
    events = Events({0: "alpha"}, True, (STALL,), None)
    assert attempt_of(events, 1, host="alpha").failure.host == "alpha"
    assert attempt_of(events, 1).failure.host == ""
    placement = Placement((Host("alpha", 1), Host("beta", 1)))
    assert attempt_of(events, 1, placement=placement).failure.host == "beta"


def test_a_preemption_may_exit_with_any_code():
    found = attempt_of(Events({0: "alpha"}, True, (PREEMPTED,), None), 0)
    assert found.is_preempted
    assert decide([found], 1).again
    assert attempt_of(Events({0: "alpha"}, True, (), None), 0).end is End.WELL


def test_nothing_is_known():
    assert cause(Events({}, True, (), None), 1, "something else", "alpha") is None


def test_events_in_the_jobs_directory(tmp_path):
    rank = OwnReports(tmp_path, rank=0)
    rank.reached_scope()
    rank.made_step()
    rank.failed(Kind.STALL, "x" * 5000, 1)
    rank.failed(Kind.EXCEPTION, "raised", 0, comes_again=True)
    append_failure(str(tmp_path), SIGNAL)
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "fail')  # by a rank that was killed
    events = read_events(str(tmp_path))
    assert list(events.hosts) == [0]
    assert events.made_step
    first, second, third = events.failures
    assert (first.kind, first.rank, first.host) == (Kind.STALL, 1, "")
    assert len(first.text) <= 1000
    assert second.comes_again
    assert second.host
    assert third == SIGNAL


def test_a_rank_without_a_supervisor_reports_nothing(capfd):
    OwnReports().failed(Kind.EXCEPTION, "raised", 0)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("before", ["", "[0]<stderr>:", "[1,0]<stderr>: ", "[rank 0 12:00:00] "])
def test_events_of_another_host_come_by_standard_error(tmp_path, capfd, before):
    rank = OwnReports(tmp_path / "elsewhere", rank=0)
    rank.reached_scope()
    rank.progress([1, 2, 2, 1, 1, 0, 2, 0, 5.0, 6.0])
    rank.failed(Kind.EXCEPTION, "raised", 0)
    lines = capfd.readouterr().err.splitlines()
    text = "".join(f"{before}{line}\n" for line in ["shown", *lines, "[kdist] shown too"])
    stream = EventLines()
    # In pieces, as pipes have them.
    shown = b"".join(stream.feed(text.encode()[at : at + 7]) for at in range(0, len(text), 7)) + stream.finish()
    assert shown.decode() == f"{before}shown\n{before}[kdist] shown too\n"
    events = read_events(str(tmp_path), stream.lines)
    assert list(events.hosts) == [0]
    assert events.failures[0].kind is Kind.EXCEPTION
    assert progress.read(str(tmp_path), events).place == (1, 0, 2)


def test_without_room_events_come_by_standard_error(tmp_path):
    rank, stream = OwnReports(tmp_path, rank=0), EventLines()
    (reading, writing), before = os.pipe(), os.dup(2)  # a file would have no room either
    os.dup2(writing, 2)
    try:
        with full_disk(30):  # half of the line fits
            rank.reached_scope()
    finally:
        os.dup2(before, 2)
        for each in (before, writing):
            os.close(each)
    with open(reading, "rb") as said:
        stream.feed(said.read())
    assert list(read_events(str(tmp_path), stream.lines).hosts) == [0]
    rank.made_step()
    assert read_events(str(tmp_path)).made_step


def test_a_progress_bar_is_not_held_back():
    stream = EventLines()
    assert stream.feed(b"1/2\r") == b"1/2\r"
    assert stream.feed(b"2/2") == b"2/2"
    assert stream.end() == "1/2\r2/2"
    assert stream.feed(b"\n[##  ]\r") == b"\n[##  ]\r"
    assert stream.feed(b"[") == b""
    assert stream.finish() == b"["


def test_an_event_behind_a_progress_bar_is_taken_out():
    event = b'[kdist-event] {"event": "step"}\n'
    for before in (b" 10%|#   |", b"[rank 0 10:11:12]  10%|#   |", b"[##  ] "):
        whole, parts = EventLines(), EventLines()
        assert whole.feed(before + event) == before + b"\n"
        shown = b"".join(parts.feed(bytes([each])) for each in before + event)
        assert shown in (before, before + b"\n")
        assert whole.lines == parts.lines == ['{"event": "step"}']


def test_progress_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "own_reports", OwnReports(tmp_path))
    mine, before = progress.OwnProgress(), time.time()

    def now():
        return progress.read(str(tmp_path), read_events(str(tmp_path)))

    assert now() is None
    mine.fit_begins()
    assert now() == progress.Progress(fits=1)
    mine.made_steps(3)
    mine.saved(0, 3, mine.steps, 7)
    mine.made_steps(2)
    mine.saved(0, 2, 2, 6)  # written in a thread, which took longer than the copy in memory
    found = now()
    assert (found.steps, found.saved_steps, found.number, found.place) == (5, 3, 7, (1, 0, 3))
    assert before <= found.first_step <= found.last_save
    assert read_events(str(tmp_path)).made_step  # one process has nothing else that says it
    mine.fit_begins()
    mine.fit_resumes(7)
    assert now().place == (1, 0, 3)
    assert now().resumed == 0
    mine.saved(0, 1, mine.steps, 8)
    assert now().place == (2, 0, 1)
    assert now().resumed == 7
    mine.fit_ends("backups", is_chief=True)  # its checkpoints are deleted: another attempt trains it again
    assert (now().steps, now().saved_steps) == (5, 0)
    mine.fit_begins()
    mine.made_steps(4)
    mine.saved(0, 2, mine.steps - 2, 9)
    assert (now().steps, now().saved_steps) == (9, 2)


def test_a_chief_on_another_host_tells_its_steps_now_and_then(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(progress, "own_reports", OwnReports(tmp_path / "elsewhere"))
    mine, stream = progress.OwnProgress(), EventLines()

    def steps():
        stream.feed(capfd.readouterr().err.encode())
        return progress.read(str(tmp_path), read_events(str(tmp_path), stream.lines)).steps

    mine.fit_begins()
    mine.made_steps(1)
    mine.made_steps(1)
    assert steps() == 1
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    mine.made_steps(1)
    assert steps() == 3
