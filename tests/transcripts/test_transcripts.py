"""The end of a job after a typical mistake: a few lines, the cause first, what to do last.

`python -m tests.transcripts NAME` writes what is expected.
"""

import re

import pytest

from tests.transcripts.mistakes import EXPECTED, MAX_LINES, MISTAKES, SCRIPTS, said_by_kdist, transcript


@pytest.mark.parametrize("name", MISTAKES)
def test_the_end_of_the_job_is_as_expected(name):
    assert transcript(name) == (EXPECTED / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_short_and_ends_with_what_to_do(name):
    command, *said, code = (EXPECTED / f"{name}.txt").read_text().splitlines()
    assert command.endswith(MISTAKES[name].typed)
    assert code == f"exit code {MISTAKES[name].code}"
    assert 0 < len(said) <= MAX_LINES
    assert re.search(MISTAKES[name].ends_with, said[-1]), said[-1]


@pytest.mark.parametrize("name", MISTAKES)
def test_the_cause_comes_first(name):
    _, first, *others, _ = (EXPECTED / f"{name}.txt").read_text().splitlines()
    assert first.startswith("kdist") or first.startswith("[kdist] ") or name == "unknown_option_of_mpirun"
    for line in others:  # the end repeats it
        what, is_summary, _ = line.removeprefix("kdist: ").partition("; the job's exit code is ")
        if is_summary:
            cause = re.sub(r" in \w+\.py:\d+$", "", what).partition(": ")[0]
            assert cause in first


def test_each_file_is_of_a_mistake():
    assert {path.stem for path in EXPECTED.iterdir()} == set(MISTAKES)
    used = {word for mistake in MISTAKES.values() for word in mistake.command.split() if word.endswith(".py")}
    assert {path.name for path in SCRIPTS.glob("*.py")} == used - {"trian.py"}


def test_what_varies_is_left_out():
    output = f"""2026-01-01 12:00:00.000: I tensorflow/core
[kdist] rank 1 of 2 on host a.b raised ValueError:
Traceback (most recent call last):
  File "{SCRIPTS}/train.py", line 3, in <module>
    fit()
    ^^^^^
ValueError: boom
[kdist] rank 1 of 2 waits for ranks that have not started: those that do not log this
[kdist rank 1] a warning
my own line
kdist: PID 77 took 12.5 s
kdist: PID 78 took 3 s
prterun noticed that process rank 1
[0]<stdout>: Process 1 exit with status code 1.
kdist run: error: unknown
"""
    said = said_by_kdist(output, is_any_rank=True)
    assert said == [
        "[kdist] rank N of 2 on host HOST raised ValueError:",
        '  File ".../train.py", line 3, in <module>',
        "    fit()",
        "ValueError: boom",
        "kdist: PID took N s",
        "kdist: PID took N s",
        "prterun noticed that process rank 1",
        "[0]<stdout>: Process 1 exit with status code 1.",
        "kdist run: error: unknown",
    ]
    assert said_by_kdist(output, is_any_rank=False)[0].startswith("[kdist] rank 1 of 2")
