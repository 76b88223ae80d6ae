"""What `kdist env` says of the cores of a process; the docstrings have more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kdist.cli.cores import NUMA, in_words, numa_nodes


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Makes what Linux says of a host with two NUMA nodes of cores, and one of memory alone."""
    for node, text in ((1, "4-7\n"), (0, "0-3\n"), (2, "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(text)
    (tmp_path / "online").write_text("0-2")
    return tmp_path


def test_the_nodes_of_a_host(host: Path) -> None:
    assert numa_nodes(host) == {0: "0-3", 1: "4-7", 2: ""}
    assert numa_nodes(host / "nowhere") == {}


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        ([5], "1 of 8 (5; NUMA node 1 of 3)"),
        ([0, 2, 3], "3 of 8 (0,2-3; NUMA node 0 of 3)"),
        (range(8), "8 of 8 (0-7; NUMA nodes 0, 1 of 3)"),
    ],
)
def test_a_rank_that_is_bound_is_told_where(host: Path, mine: list[int], said: str) -> None:
    assert in_words(mine, 8, numa_nodes(host)) == f"{said}, those that this process may use"


def test_a_kernel_that_does_not_say() -> None:
    assert in_words([0, 1], 2, {}) == "2 of 2 (0-1), those that this process may use"


def test_this_host() -> None:
    mine = os.sched_getaffinity(0)
    said = in_words(mine, os.cpu_count() or 1, numa_nodes(NUMA))
    assert said.startswith(f"{len(mine)} of {os.cpu_count()} (")
