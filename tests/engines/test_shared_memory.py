"""Sums in memory that ranks share, on 2 to 5 processes: to the bit, and what happens when a rank does not come."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("shared_memory_rank.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run():
    started = []

    def running(action, size):
        """Starts ranks, passes on what they tell each other, and returns the last line of each."""
        for rank in range(size):
            command = [sys.executable, "-m", "tests.engines.shared_memory_rank", action, str(rank), str(size)]
            started.append(
                subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        last = [""] * size
        waiting = set(range(size))
        while waiting:
            told = {rank: started[rank].stdout.readline() for rank in sorted(waiting)}
            waiting = {rank for rank, line in told.items() if line.startswith(("[", "null", "true", "false"))}
            last = [told.get(rank, last[rank]).strip() for rank in range(size)]
            everyone = json.dumps([json.loads(told[rank]) for rank in sorted(waiting)])
            for rank in waiting:
                started[rank].stdin.write(everyone + "\n")
                started[rank].stdin.flush()
        return last

    yield running
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.timeout(90)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_are_those_of_numpy_in_rank_order(run, size):
    assert run("sums", size) == ["done"] * size


@pytest.mark.timeout(90)
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_gathered_has_the_rows_of_all_ranks_in_turns_with_sums(run, size):
    assert run("gathers", size) == ["done"] * size


@pytest.mark.timeout(90)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_rank_gets_its_rows_of_sums(run, size):
    assert run("rows", size) == ["done"] * size


@pytest.mark.timeout(60)
def test_ranks_that_call_other_collectives_are_told_of_both(run):
    first, second = run("differs_in_kind", 2)
    assert "40 bytes of float32 to sum on this rank, and a gathering on rank 1" in first
    assert "a gathering on this rank, and 40 bytes of float32 to sum on rank 0" in second


@pytest.mark.timeout(60)
def test_a_sum_does_not_take_the_end_of_a_script_for_one(run):
    first, second = run("ends", 2)
    assert "4 bytes of float32 to sum on this rank, and the end of the script on rank 1" in first
    assert "the end of the script on this rank" in second


@pytest.mark.timeout(60)
def test_where_one_rank_has_no_such_memory_none_uses_it_and_nothing_is_left_open(run):
    assert run("hidden", 3) == ["done"] * 3


@pytest.mark.timeout(60)
def test_a_sum_after_one_of_sizes_that_differ_is_right(run):
    assert run("goes_on_after_a_difference", 3) == ["done"] * 3


@pytest.mark.timeout(60)
def test_ranks_that_differ_are_told_of_both_sizes(run):
    first, second = run("differs", 2)
    assert "40 bytes of float32 to sum on this rank, and 44 bytes of float32 to sum on rank 1" in first
    assert "44 bytes of float32 to sum on this rank, and 40 bytes of float32 to sum on rank 0" in second


@pytest.mark.timeout(60)
def test_ranks_whose_dtypes_differ_are_told_of_both(run):
    first, second = run("differs_in_dtype", 2)
    assert "40 bytes of float32 to sum on this rank, and 40 bytes of int32 to sum on rank 1" in first
    assert "40 bytes of int32 to sum on this rank, and 40 bytes of float32 to sum on rank 0" in second


@pytest.mark.timeout(60)
def test_a_rank_that_has_ended_is_named(run):
    assert run("dies", 2)[0].endswith("rank 1 has ended")


@pytest.mark.timeout(60)
def test_a_rank_that_has_ended_is_named_although_its_child_lives(run):
    assert run("dies_and_leaves_a_child", 2)[0].endswith("rank 1 has ended")


@pytest.mark.timeout(60)
def test_a_childs_child_keeps_what_the_child_has_opened(run):
    assert run("forks_twice", 2) == ["done"] * 2


@pytest.mark.timeout(60)
def test_a_rank_that_does_not_come_is_named_after_the_time_limit(run):
    assert run("stops", 2)[0].endswith("no answer from rank 1 within 1 s")
