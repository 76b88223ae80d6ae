"""A file is locked for a moment; a directory of checkpoints is one training's at a time."""

import subprocess
import sys

import pytest

from kdist.checkpoint.storage.locks import NAME, DirectoryLock, file_lock
from kdist.errors import CheckpointError

HOLDER = """
import sys, time
from pathlib import Path
from kdist.checkpoint.storage.locks import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
lock.acquire(job=sys.argv[2])
print("taken", flush=True)
sys.stdin.readline()
lock.release()
"""


@pytest.fixture
def holder(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "backup"), "the job"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "taken\n"
        yield process
        process.kill()


def test_another_process_is_refused_by_name(holder, tmp_path):
    with pytest.raises(CheckpointError, match=f"(?s)backup, which process {holder.pid} on host .*Fix"):
        DirectoryLock(tmp_path / "backup").acquire(patience=0.3)


def test_from_an_earlier_attempt_it_is_taken_over_after_a_while(holder, tmp_path, caplog):
    """A file server may keep the lock of a host that was lost."""
    with pytest.raises(CheckpointError, match="Two trainings"):
        DirectoryLock(tmp_path / "backup").acquire(patience=0.3, job="another job")
    lock = DirectoryLock(tmp_path / "backup")
    lock.acquire(patience=0.3, job="the job")
    assert f"is taken over from an earlier attempt, process {holder.pid} on host" in caplog.text
    lock.release()
    assert not (tmp_path / "backup" / NAME).exists()


def test_one_that_was_killed_has_given_it_back(holder, tmp_path):
    holder.kill()
    holder.wait()
    DirectoryLock(tmp_path / "backup").acquire(patience=0)


def test_it_is_waited_for(holder, tmp_path):
    holder.stdin.write("go\n")
    holder.stdin.flush()
    lock = DirectoryLock(tmp_path / "backup")
    lock.acquire()
    lock.release()
    assert list((tmp_path / "backup").iterdir()) == []


def test_an_interrupted_training_is_not_in_its_own_way(tmp_path):
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    first.acquire()
    second.acquire(patience=0)
    second.release()
    assert not (tmp_path / NAME).exists()
    first.release()


def test_what_cannot_be_claimed_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    DirectoryLock(tmp_path / "file").acquire(patience=0)


def test_a_lock_leaves_no_file(tmp_path):
    path = tmp_path / "lock"
    with file_lock(path):
        assert path.exists()
    assert not path.exists()
    with file_lock(tmp_path / "missing" / "lock"):  # a directory that cannot be written to is not locked
        pass
