"""Nodes that meet at node 0: the ranks of each, how they end together, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdist.launchers import local_cluster
from kdist.launchers.hosts.ports import free_ports
from kdist.launchers.nodes import Node

ROOT = Path(__file__).parents[2]
RANK = (
    "import json, os, sys, time; config = json.loads(os.environ['TF_CONFIG']); rank = config['task']['index']; "
    "size = len(config['cluster']['worker']); "
)
LIMIT = 60  # seconds; a generous guard


class Nodes:
    """The nodes of one job on this machine, each a launcher of its own."""

    def __init__(self) -> None:
        self.port = free_ports(1)[0]
        self.started: list[subprocess.Popen[str]] = []

    def start(self, code: str, rank: int, count: int = 2, np: int = 1, timeout: float = LIMIT, **changed: Any) -> None:
        node = Node(rank, count, "127.0.0.1", changed.get("port", self.port), np, changed.get("job", "train.py"))
        program = [sys.executable, "-c", RANK + code]
        command = local_cluster.build(sys.executable, program, np=np, env={}, node=node, start_timeout=timeout)
        self.started.append(
            subprocess.Popen(
                command.argv,
                env={**os.environ, "SLURM_STEP_NUM_TASKS": "2", "PMIX_RANK": "0", "PMI_RANK": "0"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                start_new_session=True,
            )
        )

    def ended(self) -> list[tuple[int, str]]:
        """Returns the exit code of each node, and what it said."""
        said = [process.communicate(timeout=LIMIT)[0] for process in self.started]
        return [(process.returncode, each) for process, each in zip(self.started, said, strict=True)]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    for process in made.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_each_node_starts_its_ranks_of_one_cluster(nodes: Nodes) -> None:
    """Also if node 0 comes last, and under srun with PMIx or PMI, whose tasks are no ranks."""
    code = (
        "seen = {'SLURM_STEP_NUM_TASKS', 'PMIX_RANK', 'PMI_RANK'} & os.environ.keys(); "
        "os.write(1, f'{rank} of {size} {bool(seen)}\\n'.encode())"
    )
    nodes.start(code, 1, np=2)
    time.sleep(0.5)
    nodes.start(code, 0)
    (code_1, said_1), (code_0, said_0) = nodes.ended()
    assert (code_0, said_0.splitlines()) == (0, ["0 of 3 False"])
    assert (code_1, sorted(said_1.splitlines())) == (0, ["1 of 3 False", "2 of 3 False"])


def test_the_only_node_ends_with_its_ranks(nodes: Nodes) -> None:
    nodes.start("", 0, count=1, np=2)
    assert nodes.ended() == [(0, "")]


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_ends_all_nodes_with_its_code(nodes: Nodes, who: int) -> None:
    for rank in range(3):
        nodes.start(f"rank == {who} and sys.exit(7); time.sleep(300)", rank, count=3)
    for rank, (code, said) in enumerate(nodes.ended()):
        assert code == 7, said
        assert ("exited with code 7" if rank == who else f"node {who} of 3 ended with code 7") in said


def test_a_node_that_is_killed_ends_the_others(nodes: Nodes) -> None:
    for rank in range(2):
        nodes.start("print(rank, flush=True); time.sleep(300)", rank)
    lost = nodes.started[1]
    assert lost.stdout is not None
    assert lost.stdout.readline() == "1\n"  # its rank has started
    os.killpg(lost.pid, signal.SIGKILL)
    (code, said), _ = nodes.ended()
    assert code == 1
    assert "node 1 of 2 was lost" in said


def test_a_node_that_has_ended_well_is_not_lost(nodes: Nodes) -> None:
    nodes.start("time.sleep(1.5 * (rank == 0))", 0)
    nodes.start("time.sleep(1.5 * (rank == 0))", 1)
    assert nodes.ended() == [(0, ""), (0, "")]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"rank": 1, "count": 3}, "The nodes differ in their number. Received: --nnodes 2 on node 0 and 3 on node 1"),
        ({"rank": 1, "job": "other.py"}, "The nodes start other programs. Received: train.py on node 0 and other.py"),
    ],
)
def test_nodes_of_other_jobs_are_refused(nodes: Nodes, other: dict[str, Any], said: str) -> None:
    nodes.start("", 0)
    nodes.start("", **other)
    for code, each in nodes.ended():
        assert code == 1
        assert said in each
        assert "Fix: " in each


def test_two_nodes_of_one_number_are_refused(nodes: Nodes) -> None:
    nodes.start("", 0, count=3)
    nodes.start("", 1, count=3)
    nodes.start("", 1, count=3)
    assert all(code == 1 and "Two nodes have the number 1" in said for code, said in nodes.ended())


def test_a_node_that_does_not_come_is_named(nodes: Nodes) -> None:
    nodes.start("", 0, count=3, timeout=3)
    nodes.start("", 2, count=3, timeout=3)
    for code, said in nodes.ended():
        assert code == 1
        assert "Received: 2 of 3 within 3 s" in said
        assert "node 1 is missing" in said


def test_node_0_that_is_not_there_is_told_of(nodes: Nodes) -> None:
    nodes.start("", 1, timeout=1)
    ((code, said),) = nodes.ended()
    assert code == 1
    assert f"Cannot connect to node 0. Received: [Errno 111] Connection refused from 127.0.0.1:{nodes.port}" in said


def test_a_node_that_ends_while_it_waits_may_come_again(nodes: Nodes) -> None:
    nodes.start("", 0, count=3)
    nodes.start("", 1, count=3)
    time.sleep(3)  # it has come, or comes too late to be ended: then its place is free as well
    os.killpg(nodes.started[1].pid, signal.SIGKILL)
    for rank in (1, 2):
        nodes.start("", rank, count=3)
    codes = [code for code, _ in nodes.ended()]
    assert codes == [0, -signal.SIGKILL, 0, 0]


def test_node_0_can_be_ended_while_it_waits_for_others(nodes: Nodes) -> None:
    nodes.start("rank == 0 and print('over', flush=True); time.sleep(300 * rank)", 0)
    nodes.start("time.sleep(300)", 1)
    first = nodes.started[0]
    assert first.stdout is not None
    assert first.stdout.readline() == "over\n"
    time.sleep(1)
    first.send_signal(signal.SIGTERM)
    assert [code for code, _ in nodes.ended()] == [128 + signal.SIGTERM] * 2


def test_nodes_that_wait_end_with_node_0(nodes: Nodes) -> None:
    """Where it is ended by a signal: they would else try again until the time limit, as it may be started anew."""
    nodes.start("pass", 0, count=3, timeout=600)
    nodes.start("pass", 1, count=3, timeout=600)
    first = nodes.started[0]
    assert first.stdout is not None
    assert "node 0 waits for node 2" in first.stdout.readline()  # so node 1 has come
    first.send_signal(signal.SIGTERM)
    (code, _), (other, said) = nodes.ended()
    assert code == 128 + signal.SIGTERM
    assert other == 1
    assert "Node 0 was ended before all nodes had come" in said, said


def test_what_else_finds_the_port_is_ignored(nodes: Nodes) -> None:
    nodes.start("", 0)
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            with socket.create_connection(("127.0.0.1", nodes.port), timeout=5) as stray:
                stray.sendall(json.dumps({"rank": 1}).encode() + b"\n")
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    nodes.start("", 1)
    assert [code for code, _ in nodes.ended()] == [0, 0]
