"""The README keeps its word: its script runs as printed, alone and on two processes, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.guide import fences
from tests.helpers import spmd

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return [code for _, code in fences(README, language)]


@pytest.fixture
def script(tmp_path):
    (source,) = blocks("python")
    assert len(source.splitlines()) <= 25
    path = tmp_path / "train.py"
    path.write_text(source)
    return str(path)


@pytest.mark.parametrize("start", [[], ["-m", "kdist.cli.main", "run", "-np", "2"]])
def test_the_script_runs_as_printed(start, script):
    done = spmd.execute(
        [sys.executable, *start, script], env={**spmd.RANK_ENVIRONMENT, **spmd.WITH_SKLEARN}, timeout=180
    )
    assert done.returncode == 0, done.output
    steps = 26 if start else 51  # 1617 samples, nine tenths of the digits, in batches of 32, by one or by two
    assert f"{steps}/{steps}" in done.output
    assert done.output.count("Epoch 5/5") == 1
    assert ("effective_learning_rate" in done.output) == bool(start)
    assert float(re.findall(r"val_accuracy: ([\d.]+)", done.output)[-1]) > 0.8


def test_a_script_that_does_not_run_is_seen(script):
    Path(script).write_text("import no_such_module")
    assert spmd.execute([sys.executable, script], timeout=60).returncode == 1


def test_the_commands_exist():
    commands = "".join(blocks(""))
    assert "bash tests/run\n" in commands
    subprocess.run(["bash", "-n", ROOT / "tests" / "run"], check=True, timeout=10)
    subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True, timeout=10)
    assert "bash tests/run" in (ROOT / ".ci" / "run").read_text()
    (example,) = re.findall(r"kdist run -np 2 (\S+)", commands)
    assert (ROOT / example).is_file()


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target
