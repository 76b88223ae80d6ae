"""The fixtures that every test has must be able to fail."""

import re
import sys
from pathlib import Path

import pytest

from tests.helpers import spmd

PYTEST = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "tests.conftest", "-p", "no:cacheprovider"]

LEAKS = {
    "sets_a_variable": ("import os; os.environ['LEFT_BEHIND'] = '1'", "LEFT_BEHIND"),
    "changes_a_variable": ("import os; os.environ['HOME'] = '/nowhere'", "HOME"),
    "removes_a_variable": ("import os; del os.environ['HOME']", "HOME"),
    "leaves_a_thread": ("import threading, time; threading.Thread(target=time.sleep, args=(4,)).start()", "Thread-1"),
    "leaves_nothing": ("import threading; threading.Thread(target=print, daemon=True).start()", None),
}


def test_what_a_test_leaves_behind_fails_it(tmp_path: Path) -> None:
    test = tmp_path / "test_leaks.py"
    test.write_text("".join(f"def test_{name}():\n    {line}\n" for name, (line, _) in LEAKS.items()))
    finished = spmd.execute([*PYTEST, str(test)], env={"COLUMNS": "400"}, timeout=60)
    errors = dict(re.findall(r"^ERROR \S+::test_(\w+) - (.*)$", finished.output, re.MULTILINE))
    assert errors.keys() == {name for name, (_, named) in LEAKS.items() if named}, finished.output
    assert all(named in errors[name] for name, (_, named) in LEAKS.items() if named), finished.output


SKIPPED = """
import pytest

@pytest.mark.skip(reason="no MPI")
def test_of_mpi(): pass

@pytest.mark.skip(reason="no GPU")
def test_of_a_gpu(): pass
"""


@pytest.mark.parametrize(("env", "expected"), [({"CI": "1"}, "1 skipped, 1 error"), ({}, "2 skipped")])
def test_a_test_of_mpi_that_is_skipped_fails_in_ci(
    env: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    test = tmp_path / "test_skip.py"
    test.write_text(SKIPPED)
    finished = spmd.execute([*PYTEST, str(test)], env=env, timeout=60)
    assert expected in finished.output, finished.output
    assert (finished.returncode == 0) == ("error" not in expected), finished.output
    assert ("CI must not skip this. Skipped: no MPI" in finished.output) == bool(env), finished.output


START = "subprocess.run(['true'])"
QUICK = f"""
import subprocess
import pytest
from tests.helpers import spmd
from tests.helpers.jobs import Job

@pytest.fixture
def started(): {START}

def test_starts_nothing(): pass
def test_starts_a_process(): {START}
def test_by_a_helper(): spmd.run('tests.helpers.test_spmd', 2)
def test_by_a_fixture(started): pass
def test_by_a_method(): Job('mpirun', 2).launch([], timeout=1)
def test_in_a_way_that_no_reader_of_its_code_sees(): exec({START!r})
"""


def test_the_quick_tier_starts_no_process(tmp_path: Path) -> None:
    (tmp_path / "test_quick.py").write_text(QUICK)
    said = spmd.execute([*PYTEST, str(tmp_path), "--quick"], timeout=60).output
    assert "1 failed, 1 passed, 4 deselected" in said, said
    assert re.search("^PASSED .*::test_starts_nothing$", said, re.MULTILINE), said
    assert re.search("^FAILED .*::test_in_a_way_that_no_reader_of_its_code_sees", said, re.MULTILINE), said
    assert "the mark `starts_processes`" in said, said
    of_all = spmd.execute([*PYTEST, str(tmp_path), "-k", "no_reader"], timeout=60).output
    assert "the mark `starts_processes`" in of_all, of_all


def test_a_run_ends_with_the_processor_time_of_each_file(tmp_path: Path) -> None:
    burn = "def burn():\n    end = time.process_time() + 1.2\n    while time.process_time() < end: pass\n"
    (tmp_path / "test_burns.py").write_text(f"import time\n{burn}def test_burns():\n    burn()\n")
    child = f"subprocess.run([sys.executable, '-c', {f'import time{chr(10)}{burn}burn()'!r}])"
    (tmp_path / "test_starts.py").write_text(f"import subprocess, sys\ndef test_starts():\n    {child}\n")
    (tmp_path / "test_waits.py").write_text("import time\ndef test_waits():\n    time.sleep(1.2)\n")
    said = spmd.execute([*PYTEST, str(tmp_path)], timeout=60).output
    table = said.partition("seconds by file")[2].partition("test summary")[0]
    assert "test_burns.py" in table, said
    assert "test_starts.py" in table, said
    assert "test_waits.py" not in table, said
