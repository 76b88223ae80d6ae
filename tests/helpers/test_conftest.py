"""The fixtures that every test has must be able to fail."""

import sys
from pathlib import Path

import pytest

from tests.helpers import spmd

LEAKS = {
    "sets a variable": ("import os; os.environ['LEFT_BEHIND'] = '1'", "LEFT_BEHIND"),
    "changes a variable": ("import os; os.environ['HOME'] = '/nowhere'", "HOME"),
    "removes a variable": ("import os; del os.environ['HOME']", "HOME"),
    "leaves a thread": ("import threading, time; threading.Thread(target=time.sleep, args=(4,)).start()", "Thread-1"),
    "leaves nothing": ("import threading; threading.Thread(target=print, daemon=True).start()", None),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_what_a_test_leaves_behind_fails_it(leak: str, tmp_path: Path) -> None:
    line, named = LEAKS[leak]
    test = tmp_path / "test_leak.py"
    test.write_text(f"def test_leaks():\n    {line}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(test)]
    finished = spmd.execute(command, timeout=60)
    assert (finished.returncode != 0) == (named is not None), finished.output
    assert named is None or named in finished.output


@pytest.mark.parametrize(
    ("reason", "ci", "passes"), [("no MPI", "1", False), ("no GPU", "1", True), ("no MPI", None, True)]
)
def test_a_test_of_mpi_that_is_skipped_fails_in_ci(
    reason: str, ci: str | None, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    test = tmp_path / "test_skip.py"
    test.write_text(f"import pytest\n\n\n@pytest.mark.skip(reason={reason!r})\ndef test_it(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(test)]
    finished = spmd.execute(command, env={} if ci is None else {"CI": ci}, timeout=60)
    assert (finished.returncode == 0) == passes, finished.output
    assert reason in finished.output or passes


START = "subprocess.run(['true'])"
QUICK = {
    "starts nothing": ("pass", "1 passed"),
    "starts a process": (START, "1 deselected"),
    "starts a process by a helper": ("spmd.run('tests.helpers.test_spmd', 2)", "1 deselected"),
    "starts a process by a fixture": ("started", "1 deselected"),
    "starts a process in a way that no reader of its code sees": (f"exec({START!r})", "the mark `starts_processes`"),
    "starts a process by a method": ("Job('mpirun', 2).launch([], timeout=1)", "1 deselected"),
}


@pytest.mark.parametrize("way", QUICK)
def test_the_quick_tier_starts_no_process(way: str, tmp_path: Path) -> None:
    line, expected = QUICK[way]
    fixture = "started" if line == "started" else "tmp_path"
    (tmp_path / "test_quick.py").write_text(
        "import subprocess\nimport pytest\nfrom tests.helpers import spmd\nfrom tests.helpers.jobs import Job\n\n"
        f"@pytest.fixture\ndef started(): {START}\n\n"
        f"def test_quick({fixture}):\n    {line}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    finished = spmd.execute([*command, "--quick"], timeout=60)
    assert expected in finished.output, finished.output
    assert (finished.returncode == 0) == (expected == "1 passed"), finished.output
    if "mark" in expected:  # a run of all tests says so, too
        assert expected in spmd.execute(command, timeout=60).output


def test_a_run_ends_with_the_processor_time_of_each_file(tmp_path: Path) -> None:
    burn = "def burn():\n    end = time.process_time() + 1.2\n    while time.process_time() < end: pass\n"
    (tmp_path / "test_burns.py").write_text(f"import time\n{burn}def test_burns():\n    burn()\n")
    child = f"subprocess.run([sys.executable, '-c', {f'import time{chr(10)}{burn}burn()'!r}])"
    (tmp_path / "test_starts.py").write_text(f"import subprocess, sys\ndef test_starts():\n    {child}\n")
    (tmp_path / "test_waits.py").write_text("import time\ndef test_waits():\n    time.sleep(1.2)\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    said = spmd.execute(command, timeout=60).output
    table = said.partition("seconds by file")[2]
    assert "test_burns.py" in table, said
    assert "test_starts.py" in table, said
    assert "test_waits.py" not in table, said
