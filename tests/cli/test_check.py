"""`kdist check`: the smoke test passes, and a script that fails does not."""

import re
import sys

import pytest

from kdist.cli.smoke import judgement
from tests.helpers import spmd

COMMAND = [sys.executable, "-m", "kdist.cli.main", "check", "-np", "2"]


@pytest.mark.timeout(180)
def test_it_passes_here():
    done = spmd.execute(COMMAND, timeout=150)
    assert done.returncode == 0, done.output
    for word in [
        "rank 0",
        "rank 1",
        "CPU:0",
        "GB/s",
        "µs",
        "within 1e-05",
        "load TensorFlow",
        "kdist check: passed: the ranks train",
    ]:
        assert word in done.output, done.output
    assert "oneDNN" not in done.output


def test_the_speed_of_messages_is_judged():
    assert judgement(2e-5, 4e9) == "a step of a model of 10 million weights sends for 10 ms"
    for slow in (judgement(3e-3, 4e9), judgement(2e-5, 5e7)):
        assert "SLOW. Fix: " in slow


@pytest.mark.parametrize("strategy", ["single", "parameter_server"])
def test_ranks_that_do_not_train_together_are_not_compared(strategy):
    done = spmd.execute([*COMMAND, "--strategy", strategy], timeout=60)
    assert done.returncode == 2, done.output
    assert f"Received: --strategy {strategy} without a script." in done.output


def test_a_user_script_that_fails(tmp_path):
    (tmp_path / "mine.py").write_text("import sys; sys.exit(5)")
    done = spmd.execute([*COMMAND, str(tmp_path / "mine.py")], timeout=60)
    assert done.returncode == 5
    assert "kdist check: failed with exit code 5" in done.output
    assert re.search(r"^kdist check: rank [01] of 2 on host \S+ exited with code 5$", done.output, re.MULTILINE)
    assert "prterun" not in done.output  # mpirun's own box


def test_zero_ranks_are_refused():
    done = spmd.execute([*COMMAND[:-1], "0"], timeout=60)
    assert done.returncode == 2
    assert "Received: -np 0" in done.output
