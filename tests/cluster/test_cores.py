"""Ranks that have fewer cores than they are: counted by masks and by the limits of cgroups."""

import math

import pytest

from kdist.cluster.cores import (
    limit_of_cgroups,
    own_cores,
    remark_on_cores,
    remark_on_start,
    remark_on_threads,
)


def on(cores, host="a", limit=8, total=8):
    return [host, cores, limit, total]


@pytest.mark.parametrize(
    ("of_ranks", "said"),
    [
        ([on([0, 1])] * 2, ""),
        ([on([0]), on([1])], ""),  # each is bound to its own core
        ([on([0]), on([0], host="b")], ""),
        ([on([0, 1], limit=2, total=2)] * 3, "3 ranks share 2 core(s) of host a: they train no faster than 2 would"),
        ([on([0])] * 2, "2 ranks share 1 core(s) of host a"),  # others are idle
        ([on([0]), on([0]), on(range(1, 8)), on(range(1, 8))], "2 ranks share 1 core(s) of host a"),
        ([on([0]), on([1]), on([0, 1])], "3 ranks share 2 core(s) of host a"),
        ([on(range(8), limit=2)] * 4, "4 ranks share 2 core(s) of host a"),  # in a container
        ([on([0, 1]), on([0, 1]), *[on([4], host="b")] * 2], "2 ranks share 1 core(s) of host b"),
    ],
)
def test_ranks_that_have_fewer_cores_than_they_are(of_ranks, said):
    found = remark_on_cores(of_ranks, local_size=4)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_the_fix():
    assert remark_on_cores([on([0, 1], total=2, limit=2)] * 3, 3).endswith("Fix: -np 2, or more hosts")
    assert "Fix: -np 1, or more of its 8 cores (`taskset`" in remark_on_cores([on([0])] * 2, 2)
    assert remark_on_cores([on([0, 1])] * 4, local_size=2) == ""  # two hosts of one name


def test_far_more_ranks_than_cores_are_remarked_on_before_they_start():
    own = on([0, 1, 2, 3], limit=2)
    assert remark_on_start(8, own) == ""
    assert remark_on_start(64, own).startswith("64 ranks on 2 core(s): they train no faster than 2 would")
    assert remark_on_start(64, own).endswith("Fix: -np 2, or more hosts")


def test_limits_of_cgroups(tmp_path):
    (tmp_path / "pod" / "box").mkdir(parents=True)
    (tmp_path / "pod" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "pod" / "box" / "cpu.max").write_text("max 100000\n")
    assert limit_of_cgroups("0::/pod/box\n", tmp_path) == 2
    assert limit_of_cgroups("0::/\n", tmp_path) == math.inf
    assert limit_of_cgroups("", tmp_path) == math.inf
    (tmp_path / "cpu,cpuacct").mkdir()  # of version 1, within a container that sees its own group as the root
    for name, value in (("quota", "400000"), ("period", "100000")):
        (tmp_path / "cpu,cpuacct" / f"cpu.cfs_{name}_us").write_text(value)
    assert limit_of_cgroups("4:memory:/a\n3:cpu,cpuacct:/docker/17\n0::/pod/box", tmp_path) == 2
    assert limit_of_cgroups("3:cpu,cpuacct:/docker/17", tmp_path) == 4


def test_what_ranks_send_of_this_process():
    host, cores, limit, total = own_cores()
    assert host
    assert 1 <= len(cores) <= total
    assert 1 <= limit <= total


def test_ranks_with_other_numbers_of_threads_are_warned_of():
    assert remark_on_threads([4, 4]) == ""
    text = remark_on_threads([4, 2, 4])
    assert "2 on rank(s) [1]; 4 on rank(s) [0, 2]" in text
    assert "TF_NUM_INTRAOP_THREADS=2" in text
