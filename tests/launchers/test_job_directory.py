"""The directory of a job, and what a killed `kdist run` leaves."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kdist.errors import LaunchError
from kdist.launchers import job_directory as job_directory_module
from kdist.launchers.job_directory import Owner, job_directory
from kdist.restarts import request
from tests.callbacks.full_disk import full_disk

HOLD = """
from kdist.launchers.job_directory import job_directory
with job_directory() as path:
    print(path, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path))
    return tmp_path


def test_it_is_removed():
    with job_directory() as path:
        assert Path(path).is_dir()
    assert not Path(path).exists()


def test_a_full_disk_does_not_end_the_job():
    with full_disk(), job_directory() as path:
        assert Path(path).is_dir()
    assert not Path(path).exists()


def test_a_temporary_directory_that_cannot_be_used_is_told_of(temporary, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    with pytest.raises(LaunchError, match=r"(?s)missing.*Fix: .*TMPDIR"), job_directory():
        pass


def test_its_files_stay_young(monkeypatch):
    """A system removes what is old from /tmp; a long job writes its files once."""
    monkeypatch.setattr(job_directory_module, "_RENEWAL", 0.05)
    with job_directory() as path:
        file = Path(path, "events.jsonl")
        file.touch()
        os.utime(file, (0, 0))
        limit = time.monotonic() + 20
        while file.stat().st_mtime == 0 and time.monotonic() < limit:
            time.sleep(0.05)
        assert file.stat().st_mtime > 0


def test_what_a_killed_process_has_left_is_removed(temporary):
    environment = {**os.environ, "TMPDIR": os.fspath(temporary)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        left = Path(process.stdout.readline().strip())
        asked = Path(request.path_of(left, request.NOTICE))
        asked.touch()
        with job_directory():
            assert left.is_dir()  # it runs
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    assert left.is_dir()
    with job_directory():
        assert not left.exists()
        assert not asked.exists()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "is_gone"),
    [
        ({}, False),
        ({"began": 1}, True),  # its id was given away again
        ({"pid": 1 << 30}, True),
        ({"boot": "another"}, True),
        ({"host": "another", "pid": 1 << 30}, False),
        ({"namespace": "another", "pid": 1 << 30}, False),
    ],
)
def test_an_owner_that_is_gone(temporary, changes, is_gone):
    now = Owner.of_this_process()
    owner = dataclasses.replace(now, **changes)
    assert owner.is_gone(now) == is_gone
    path = temporary / "kdist-left"
    path.mkdir()
    (path / "owner.json").write_text(json.dumps(dataclasses.asdict(owner)))
    with job_directory():
        assert path.exists() != is_gone


@pytest.mark.parametrize("text", [None, "", "[]", '{"pid": 1}'])
def test_other_directories_stay(temporary, text):
    path = temporary / "kdist-other"
    path.mkdir()
    if text is not None:
        (path / "owner.json").write_text(text)
    with job_directory():
        assert path.exists()
