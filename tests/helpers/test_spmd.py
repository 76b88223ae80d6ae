"""The helper that runs cases on several ranks must itself be able to fail, and must leave nothing behind."""

import os
import time
from pathlib import Path

import pytest

from tests.helpers import spmd

HERE = __name__
RANK = "OMPI_COMM_WORLD_RANK"


def case_returns_its_rank() -> int:
    return int(os.environ[RANK])


def case_fails_everywhere() -> None:
    raise ValueError("everywhere")


def case_fails_on_rank_1_while_rank_0_waits() -> None:
    if os.environ[RANK] == "1":
        raise ValueError("only here")
    time.sleep(60)


def case_is_told(given: str) -> str:
    return given


def case_passes_at_the_end() -> None:
    print("said by", os.environ[RANK])


def something_given() -> str:
    return "something"


def hangs() -> None:
    time.sleep(60)


HANGING = {"hanging": hangs, "after": case_returns_its_rank}
MAPPING = {"first": case_returns_its_rank, "second": case_is_told}


@pytest.fixture(scope="module")
def result() -> spmd.Result:
    return spmd.run(HERE, 2, given=f"{HERE}:something_given", timeout=30)


def test_every_case_is_reported(result: spmd.Result) -> None:
    assert list(result.reports) == list(result.cases) == spmd.names(HERE)
    assert result.values("case_returns_its_rank") == [0, 1]
    assert result.values("case_is_told") == ["something"] * 2
    assert "said by 1" in result.outputs[1]
    assert "said by" not in result.outputs[0].replace("said by 0", "")


def test_a_failure_shows_each_ranks_traceback(result: spmd.Result) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0 of 2.*ValueError: everywhere.*rank 1 of 2.*everywhere"):
        result.check("case_fails_everywhere")
    assert result.returncode != 0


def test_a_failure_on_one_rank_ends_the_others(result: spmd.Result) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2.*ValueError: only here.*not finished by ranks \[0\]"):
        result.check("case_fails_on_rank_1_while_rank_0_waits")


def test_cases_after_a_failed_one_run_in_a_new_launch(result: spmd.Result) -> None:
    result.check("case_passes_at_the_end")
    with pytest.raises(AssertionError):
        result.check()


def test_a_mapping_gives_cases_by_name() -> None:
    result = spmd.run(f"{HERE}:MAPPING", 1, given=f"{HERE}:something_given", only=["second"], timeout=30)
    result.check()
    assert result.values("second") == ["something"]


def test_a_hang_ends_at_the_limit_with_each_ranks_stack() -> None:
    result = spmd.run(f"{HERE}:hangs", 2, timeout=4)
    with pytest.raises(AssertionError, match="killed at the time limit"):
        result.check("hangs")
    assert all("in hangs" in output for output in result.outputs)


def test_cases_that_were_not_reached_say_so() -> None:
    target = f"{HERE}:HANGING"
    result = spmd.run(target, 1, timeout=2)
    with pytest.raises(AssertionError, match="not finished by ranks \\[0\\] of 1"):
        result.check("hanging")
    with pytest.raises(AssertionError, match="after was not run.* hanging$"):
        result.check("after")
    with pytest.raises(AssertionError):
        result.check()


def test_nothing_survives_the_limit(tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    script = f"setsid sleep 60 & echo $! > {pidfile}; trap '' TERM; while :; do sleep 1; done"
    finished = spmd.execute(["bash", "-c", script], timeout=1)
    assert finished.timed_out
    time.sleep(0.2)
    assert not Path("/proc", pidfile.read_text().strip(), "cmdline").exists() or not (
        Path("/proc", pidfile.read_text().strip(), "cmdline").read_bytes()
    )


def test_a_target_that_cannot_be_imported_is_a_failure_not_a_hang() -> None:
    result = spmd.run(f"{HERE}:MAPPING", 2, given="tests.no_such_module:engine", timeout=30)
    with pytest.raises(AssertionError, match="No module named 'tests.no_such_module'"):
        result.check("first")
    assert all(output.count("Traceback") == 1 for output in result.outputs), "launched once"


def test_temporary_files_of_a_killed_job_are_removed() -> None:
    finished = spmd.execute(["bash", "-c", "touch $TMPDIR/session && echo $TMPDIR; sleep 60"], timeout=1)
    assert finished.timed_out
    assert finished.output.strip()
    assert not Path(finished.output.strip()).exists()
