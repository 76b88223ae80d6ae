"""The source as ruff and mypy see it, and the titles of commits."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CHECKS = {
    "lint": ["ruff", "check", "--no-cache"],
    "format": ["ruff", "format", "--check", "--no-cache"],
    "types": ["mypy"],
}
WRONG = {
    "lint": "import os\n",
    "format": '"""A module."""\n\nx = {  "a":1 }\n',
    "types": '"""A module."""\n\n\ndef f(x: int) -> str:\n    """Adds."""\n    return x + 1\n',
}

LAST_LONG_TITLE = "3ef56fb1f22d"  # before the rule was a test
COLUMNS_OF_TITLE = 72


def run(check: str, *paths: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *CHECKS[check], *paths]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("check", CHECKS)
def test_nothing_to_complain_of(check):
    done = run(check, *([] if check == "types" else ["."]))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_wrong_is_seen(check, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG[check])
    done = run(check, str(tmp_path / "wrong.py"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "wrong.py" in done.stdout


def titles(revisions: str) -> list[str]:
    """Returns the titles of commits; skips the test where git, or its history, is not there."""
    command = ["git", "log", "--no-merges", "--format=%s", revisions, "--"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no history of commits here: {error}")
    return done.stdout.splitlines()


def too_long(found: list[str]) -> list[str]:
    return [title for title in found if len(title) > COLUMNS_OF_TITLE]


def test_titles_of_commits_are_short():
    assert too_long(titles(f"{LAST_LONG_TITLE}..HEAD")) == []


def test_a_long_title_is_seen():
    assert len(too_long(titles(f"{LAST_LONG_TITLE}~1..HEAD"))) == 1
