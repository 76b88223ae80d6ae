"""The source as ruff and mypy see it."""

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
