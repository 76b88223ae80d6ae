"""Tasks of a Slurm step that find each other: what they read, and what is told where they do not; see test_slurm.py."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdist.errors import ClusterError
from kdist.launchers.hosts.slurm_nodes import first_node, host_of
from kdist.launchers.slurm_step import port_of

ROOT = Path(__file__).parents[2]
LIMIT = 60  # seconds; a generous guard

RANK = """
import json, os, sys
from kdist.cluster import detect
from kdist.launchers.slurm_step import exchange
rank = os.environ["SLURM_PROCID"]
print(json.dumps(exchange(detect(os.environ), os.environ, float(sys.argv[1]), f"word of {rank}")))
"""


def step(size: int = 3, **changed: str) -> dict[str, str]:
    """Returns the variables of a step on this host, all of whose tasks but rank 0 are on a second node."""
    return {
        "SLURM_CLUSTER_NAME": f"test{os.getpid()}",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": f"1,{size - 1}",
        "SLURM_STEP_NODELIST": "localhost,127.0.0.2",
        **changed,
    }


def start(rank: int, env: dict[str, str], timeout: float = LIMIT, program: str = RANK) -> subprocess.Popen[str]:
    own = {
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(int(rank > 0)),
        "SLURM_LOCALID": str(max(rank - 1, 0)),
        "SLURMD_NODENAME": "127.0.0.2" if rank else "localhost",
    }
    return subprocess.Popen(
        [sys.executable, "-c", program, str(timeout)],
        env={**os.environ, **env, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


@contextlib.contextmanager
def started(
    ranks: list[int], env: dict[str, str], timeout: float = LIMIT, program: str = RANK
) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [start(rank, env, timeout, program) for rank in ranks]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ended(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=LIMIT)[0]


def test_all_ranks_learn_all_addresses() -> None:
    with started([2, 1, 0], step()) as processes:
        said = [json.loads(ended(process)) for process in processes]
    (addresses, words), *others = said
    assert others == [[addresses, words]] * 2
    assert words == ["word of 0", "word of 1", "word of 2"]
    assert [address.rpartition(":")[0] for address in addresses] == ["localhost", "127.0.0.2", "127.0.0.2"]
    assert len(set(addresses)) == 3


WORDS = """
import json, os
from kdist.cluster import detect
from kdist.launchers.slurm_step import payloads_of_all
info = detect(os.environ)
print(json.dumps(payloads_of_all(info, os.environ, 60, f"word of {info.rank}")))
"""


def test_all_ranks_learn_a_word_of_each() -> None:
    with started([1, 0], step(size=2), program=WORDS) as processes:
        said = [json.loads(ended(process)) for process in processes]
    assert said == [[["localhost", "word of 0"], ["127.0.0.2", "word of 1"]]] * 2


def test_a_rank_that_does_not_come_is_named() -> None:
    with started([0, 2], step(), timeout=3) as processes:
        said = [ended(process) for process in processes]
    for each in said:
        assert "Not all ranks have come. Received: 2 of 3 within 3 s at localhost:" in each
        assert "rank 1 is missing" in each
        assert "srun --kill-on-bad-exit" in each


def port(env: dict[str, str]) -> int:
    return port_of(f"{env['SLURM_CLUSTER_NAME']} 77 0 0")


def test_a_port_that_is_taken_is_told_of() -> None:
    env = step()
    with socket.create_server(("", port(env))), started([0], env) as (process,):
        said = ended(process)
    assert f"Rank 0 cannot listen on its port. Received: port {port(env)}" in said
    assert "Fix: start the job again: its number decides the port." in said


def test_a_rank_of_another_step_is_ignored() -> None:
    env = step(size=2)
    with started([0], env) as (first,):
        hello = {"rank": 1, "count": 2, "job": "", "name": "another", "addresses": [], "payload": []}
        limit = time.monotonic() + LIMIT
        while True:
            try:
                stray = socket.create_connection(("localhost", port(env)), timeout=LIMIT)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < limit
                time.sleep(0.1)
        with stray:
            stray.sendall(json.dumps(hello).encode() + b"\n")
            assert stray.recv(1) == b""  # it is not kept waiting
        with started([1], env) as (second,):
            assert json.loads(ended(first)) == json.loads(ended(second))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("alpha", "alpha"),
        ("alpha,beta", "alpha"),
        ("n[0-3,7]", "n0"),
        ("gpu[003-007,12]-ib,login", "gpu003-ib"),
        ("rack[1-2]n[08,11]", "rack1n08"),
        ("n[5]", "n5"),
    ],
)
def test_the_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",", "]"])
def test_a_list_of_no_nodes_is_refused(nodes: str) -> None:
    with pytest.raises(ClusterError, match="SLURM_STEP_NODELIST=.*Fix: "):
        first_node(nodes)


def test_another_start_meets_at_another_port() -> None:
    ports = {port_of(f"kdist 77 0 {count}") for count in range(50)}
    assert len(ports) > 45
    assert all(10_000 <= each < 32_000 for each in ports)


def test_a_node_without_a_name_has_the_address_that_slurm_knows() -> None:
    aliases = "cloud0.invalid:[10.0.0.1]:cloud0.invalid,cloud1.invalid:10.0.0.2:host"
    assert host_of("localhost", {"SLURM_NODE_ALIASES": aliases}) == "localhost"
    assert host_of("cloud0.invalid", {"SLURM_NODE_ALIASES": aliases}) == "10.0.0.1"
    assert host_of("cloud1.invalid", {"SLURM_NODE_ALIASES": aliases}) == "10.0.0.2"
    with pytest.raises(ClusterError, match=r"A node of the step has no address.*cloud2.*scontrol.*Fix: "):
        host_of("cloud2.invalid", {"SLURM_NODE_ALIASES": "(null)"})
