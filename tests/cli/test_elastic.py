"""`kdist run --min-np --max-np`: the arguments, where attempts run, and when a running one is asked to leave."""

from __future__ import annotations

import dataclasses
import os
import time
import uuid
from pathlib import Path

import pytest

from kdist.cli.jobs import command, elastic, nodes
from kdist.cli.main import make_parser
from kdist.errors import LaunchError
from kdist.launchers.hosts.capacity import Placement
from kdist.launchers.hosts.host import Host
from kdist.restarts import request
from kdist.restarts.attempt import Attempt, End
from kdist.restarts.events import Events, Failure, Kind

HOSTS = ["-H", "a:2,b:2", "--restarts", "3"]
LISTENS = Events({}, True, (), None, can_leave=True)


def elastic_of(*line: str, env: dict[str, str] | None = None) -> elastic.Elastic | None:
    options = make_parser().parse_args(["run", *line, "train.py"])
    nodes.node_of(options, ["train.py"], {})
    return elastic.elastic_of(options, env or {})


@pytest.mark.parametrize(
    ("line", "least", "most"),
    [
        ([*HOSTS, "--min-np", "2"], 2, 4),
        ([*HOSTS, "--max-np", "3", "-np", "2"], 2, 3),
        ([*HOSTS, "--min-np", "1", "-np", "3"], 1, 3),
        ([*HOSTS, "--min-np", "1", "--max-np", "2"], 1, 2),
        ([*HOSTS, "--min-np", "4"], 4, 4),
    ],
)
def test_the_numbers_of_ranks(line: list[str], least: int, most: int) -> None:
    found = elastic_of(*line)
    assert found is not None
    assert (found.min_np, found.max_np) == (least, most)
    assert found.agent[0] == "ssh"


def test_a_job_of_a_fixed_size() -> None:
    assert elastic_of(*HOSTS) is None
    assert elastic_of("-np", "2") is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["-H", "a:2,b:2", "--min-np", "2"], "--min-np 2 needs --restarts"),
        (["-np", "4", "--restarts", "3", "--min-np", "2"], "--min-np 2 needs hosts"),
        ([*HOSTS, "--min-np", "3", "--max-np", "2"], "contradict each other.*from 3 to 2 ranks"),
        ([*HOSTS, "--min-np", "0"], "contradict each other.*from 0 to 4 ranks"),
        ([*HOSTS, "--min-np", "2", "--max-np", "0"], "contradict each other.*from 2 to 0 ranks"),
        ([*HOSTS, "--min-np", "2", "--max-np", "5"], "contradict each other.*has 4 slot"),
        ([*HOSTS, "--max-np", "3"], "contradict each other.*from 4 to 3 ranks"),
        ([*HOSTS, "--strategy", "parameter_server", "--min-np", "2"], "not for parameter servers"),
        ([*HOSTS, "--min-np", "1", "--max-np", "3", "-np", "2"], "-np 2 --min-np 1 --max-np 3"),
        ([*HOSTS, "--wait", "5"], "--wait has no effect"),
        ([*HOSTS, "--look", "5"], "--look has no effect"),
        ([*HOSTS, "--min-np", "2", "--look", "0"], "--wait or --look is out of range"),
        ([*HOSTS, "--min-np", "2", "--wait", "nan"], "--wait or --look is out of range"),
        (["--rendezvous", "a", "--min-np", "2"], "--min-np cannot be used with --rendezvous"),
    ],
)
def test_what_does_not_fit_is_refused(line: list[str], said: str) -> None:
    with pytest.raises(LaunchError, match=f"(?s){said}.*Expected .*Fix: "):
        elastic_of(*line)


class Cluster:
    """Hosts that are up or down, by files, and what is said of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, folder / f"running-{uuid.uuid4().hex}"
        self.hosts = [Host(name) for name in "abc"]
        self.agent = folder / "agent"
        self.agent.write_text(f'#!/bin/sh\n[ -e {folder}/$1 ] || exit 255\nshift; "$@"\n')
        self.agent.chmod(0o755)

    def up(self, *names: str) -> None:
        for name in names:
            (self.folder / name).touch()

    def elastic(self, least: int, wait: float = 0.0, look: float = 0.0) -> elastic.Elastic:
        return elastic.Elastic(least, 3, wait, look, (os.fspath(self.agent),), lambda: self.hosts)

    def looks(self, growth: elastic.Growth, events: Events, seconds: float = 2.0) -> bool:
        """Looks as `kdist run` does; returns whether the ranks were asked to leave."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and request.read(self.running) is None:
            growth.look(os.fspath(self.running), lambda: events)
            time.sleep(0.02)
        return request.read(self.running) is not None


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def placed(*names: str) -> Placement:
    return Placement(tuple(map(Host, names)))


def attempt(kind: Kind, *hosts: str) -> Attempt:
    return Attempt(End.FAILED, 75, 0.0, time.time(), LISTENS, Failure(kind, "", None, "b"), None, None, hosts)


def test_an_attempt_takes_the_hosts_that_answer(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.up("a", "c")
    assert cluster.elastic(2).next_placement([], lambda: False) == placed("a", "c")
    assert "2 of at most 3 ranks, on a:1,c:1: b does not answer" in capsys.readouterr().err
    cluster.up("b")
    assert cluster.elastic(2).next_placement([], lambda: False) == placed("a", "b", "c")
    assert capsys.readouterr().err == ""
    lost = attempt(Kind.LOST, "a", "b", "c")
    assert cluster.elastic(2, look=30).next_placement([lost], lambda: False) == placed("a", "c")
    assert "b is left out for a while" in capsys.readouterr().err
    assert cluster.elastic(3, look=30).next_placement([lost], lambda: False) == placed("a", "b", "c")


@pytest.mark.starts_processes
def test_this_host_alone_is_reached_without_its_network() -> None:
    options = make_parser().parse_args(["run", "-H", "127.0.0.1:2,b:1", "train.py"])
    assert "localhost:2" in command.build(options, ["python"], placement=Placement((Host("127.0.0.1", 2),))).argv
    assert "127.0.0.1:1,b:1" in command.build(options, ["python"], placement=placed("127.0.0.1", "b")).argv


def test_too_few_hosts_are_waited_for(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.up("a")
    why = cluster.elastic(2, wait=0.5).next_placement([], lambda: False)
    assert str(why).startswith("too few hosts for --min-np 2: b, c do not answer, for 0.5 s; asked by `")
    assert capsys.readouterr().err.count("they have 0.5 s to come") == 1
    assert cluster.elastic(2, wait=60).next_placement([], lambda: True) == "kdist run was asked to end"


def test_a_larger_job_is_asked_for(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    planner = elastic.PlacementPlanner(cluster.elastic(1), lambda: False)
    cluster.up("a", "c")
    assert planner.next([]) == placed("a", "c")
    growth = planner.growth
    assert growth is not None
    assert not cluster.looks(growth, LISTENS, 0.5)
    assert growth.wanted is None
    cluster.up("b")
    assert cluster.looks(growth, LISTENS)
    assert "all ranks are asked to save and leave, for 3 ranks instead of 2: b can take part" in capsys.readouterr().err
    growth.close(os.fspath(cluster.running))
    assert request.read(cluster.running) is None
    (cluster.folder / "b").unlink()
    # It is not asked again: if it does not start, it is left out.
    assert planner.next([attempt(Kind.RESIZE, "a", "c")]) == placed("a", "b", "c")
    assert planner.next([attempt(Kind.SIGNAL, "a", "b", "c")]) == placed("a", "c")


def test_a_host_that_does_not_answer_explains_an_end_of_unknown_cause(cluster: Cluster) -> None:
    """Open MPI says to its standard output that a daemon is gone."""
    planner = elastic.PlacementPlanner(cluster.elastic(1), lambda: False)
    cluster.up("a", "c")
    unknown = dataclasses.replace(attempt(Kind.LOST, "a", "b", "c"), failure=None)
    lost = planner.explained([], unknown).failure
    assert lost == Failure(Kind.LOST, "host b does not answer any more", None, "b")
    cluster.up("b")
    assert planner.next([unknown]) == placed("a", "c")  # it is not asked again at once
    assert planner.explained([], unknown) == unknown
    failed = dataclasses.replace(unknown, events=Events({}, False, (), None))
    smaller = attempt(Kind.RESIZE, "a", "c")
    late = planner.explained([unknown, smaller], failed).failure
    assert late == Failure(Kind.LOST, "host b came in addition, and the job does not start with it", None, "b")
    (cluster.folder / "b").unlink()
    killed = attempt(Kind.SIGNAL, "a", "b", "c")
    assert planner.explained([], killed) == killed


def test_a_job_that_cannot_leave_is_told_of_once(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.up("a", "b", "c")
    growth = elastic.Growth(cluster.elastic(1), placed("a", "c"), [])
    assert not cluster.looks(growth, Events({}, False, (), None), 0.3)
    assert capsys.readouterr().err == ""  # it has not begun
    assert not cluster.looks(growth, Events({}, True, (), None), 0.5)
    assert capsys.readouterr().err.count("Fix: fit(callbacks=[kdist.callbacks.BackupAndRestore") == 1
    growth.close(os.fspath(cluster.running))


def test_a_host_that_is_left_out_makes_no_larger_job(cluster: Cluster) -> None:
    cluster.up("a", "b", "c")
    lost = [attempt(Kind.LOST, "a", "b", "c")]
    growth = elastic.Growth(cluster.elastic(1, look=1.0), placed("a", "c"), lost)
    assert not cluster.looks(growth, LISTENS, 1.2)
    assert cluster.looks(growth, LISTENS, 10.0)
    growth.close(os.fspath(cluster.running))


def test_a_hostfile_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=2\nb slots=2\n")
    found = elastic_of("--hostfile", os.fspath(file), "--restarts", "1", "--min-np", "2")
    assert found is not None
    file.write_text("a slots=2\nc slots=2\n")
    assert [host.name for host in found.read_hosts()] == ["a", "c"]
    file.write_text("")
    for _ in range(2):
        assert [host.name for host in found.read_hosts()] == ["a", "c"]
    assert capsys.readouterr().err.count("the hosts are those of before") == 1
