"""Copies of checkpoints in the memory of this host."""

import contextlib
import functools
import os
import resource
import secrets
import subprocess
import sys
import time

import numpy as np
import pytest

from kdist.checkpoint.storage.files import CheckpointDirectory
from kdist.checkpoint.storage.memory_copies import MemoryCopies
from kdist.cli.jobs import left_copies
from kdist.restarts.memory import MEMORY, delete_old, directory_of
from kdist.state.part import DeferredArray
from tests.helpers import spmd


@pytest.fixture
def job():
    name = secrets.token_hex(8)
    yield name
    for path in directory_of(name).glob("*"):
        path.unlink()
    with contextlib.suppress(FileNotFoundError):
        directory_of(name).rmdir()


def checkpoint(number, rows=3):
    table = DeferredArray((rows, 2), np.float32, lambda _: [np.full((1, 2), number, np.float32)] * rows)
    model = {"variables": [[3, "float32"]], "variable/0": np.arange(number, dtype=np.int64), "variable/1": table}
    training = {"number": number, "nothing": np.zeros((0, 4)), "scalar": np.float64(2.5)[()]}
    return {"model": model, "training": training}


def assert_same(found, number, rows=3):
    expected = checkpoint(number, rows)
    assert found.keys() == expected.keys()
    for part, state in expected.items():
        assert found[part].keys() == state.keys()
        for name, value in state.items():
            np.testing.assert_array_equal(np.asarray(found[part][name]), np.asarray(value))
            assert np.asarray(found[part][name]).dtype == np.asarray(value).dtype


def test_the_newest_is_read_by_another_process(job):
    copies = MemoryCopies(job, "backup")
    assert copies.newest() == 0
    for number in (4, 5, 6):
        copies.write(checkpoint(number), number, [0])
    again = MemoryCopies(job, "backup")
    assert again.newest() == 6
    assert_same(again.read(), 6)
    assert MemoryCopies(job, os.fsdecode(b"donn\xe9es")).newest() == 0  # a name that is not UTF-8
    again.delete()
    assert not directory_of(job).exists()


def test_one_that_was_being_written_leaves_the_other(job):
    copies = MemoryCopies(job, "backup")
    copies.write(checkpoint(1), 1, [0])
    unfinished = checkpoint(2)
    unfinished["model"]["variable/1"] = DeferredArray((3, 2), np.float32, _killed)
    with pytest.raises(SystemExit):
        copies.write(unfinished, 2, [0])
    assert copies.newest() == 1
    assert_same(copies.read(), 1)
    copies.write(checkpoint(3, rows=1), 3, [0])
    assert_same(copies.read(), 3, rows=1)


def test_without_room_all_arrays_are_made_and_the_other_is_left(job):
    """Other ranks wait for this one's parts."""
    copies, made = MemoryCopies(job, "backup"), []
    copies.write(checkpoint(1), 1, [0])
    large = checkpoint(2)
    for name in ("variable/1", "variable/2", "variable/3"):
        large["model"][name] = DeferredArray((2, 1 << 13), np.float64, functools.partial(_noted, made, name))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            copies.write(large, 2, [0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert made == [f"variable/{place} block {block}" for place in (1, 2, 3) for block in (0, 1)]
    assert_same(copies.read(), 1)


def test_of_a_damaged_copy_the_earlier_one_is_read(job, caplog):
    copies = MemoryCopies(job, "backup")
    for number in (1, 2):
        copies.write(checkpoint(number), number, [0])
    damaged = max(directory_of(job).iterdir(), key=lambda path: path.read_bytes()[0])
    os.truncate(damaged, damaged.stat().st_size - 3)
    again = MemoryCopies(job, "backup")
    assert again.newest() == 1
    assert f"{damaged}, cannot be read" in caplog.text
    assert_same(again.read(), 1)
    again.write(checkpoint(3), 3, [0])  # not over the one that can be read
    assert {path.read_bytes()[0] for path in directory_of(job).iterdir()} == {1, 3}
    assert_same(again.read(), 3)


def test_what_a_job_leaves_in_memory_goes_to_disk(job, tmp_path, capsys):
    folder = tmp_path / "backup"
    CheckpointDirectory(folder).write(checkpoint(3))
    copies = MemoryCopies(job, folder)
    for number in (4, 5):
        copies.write(checkpoint(number), number, [0])
    left_copies.write(job)
    assert_same(CheckpointDirectory(folder).read()[1], 5)
    assert f"now in {folder / 'checkpoint-00000002'}" in capsys.readouterr().err
    assert not directory_of(job).exists()
    copies.write(checkpoint(4), 4, [0])  # the disk has a newer one
    left_copies.write(job)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-00000001", "checkpoint-00000002"]
    assert capsys.readouterr().err == ""
    assert not directory_of(job).exists()


def test_what_cannot_go_to_disk_stays_in_memory(job, tmp_path, capsys):
    blocked = tmp_path / "blocked"
    blocked.touch()
    MemoryCopies(job, blocked / "backup").write(checkpoint(1), 1, [0])
    left_copies.write(job)
    said = capsys.readouterr().err
    assert f"left in memory, in {directory_of(job)}" in said
    blocked.unlink()
    command = said.rpartition("then: python ")[2].split()
    subprocess.run([sys.executable, *command], check=True, cwd=spmd.ROOT)
    assert_same(CheckpointDirectory(blocked / "backup").read()[1], 1)
    assert not directory_of(job).exists()


def test_copies_of_jobs_that_are_long_over_are_deleted(job):
    copies = MemoryCopies(job, "backup")
    copies.write(checkpoint(1), 1, [0])
    delete_old(besides="another")
    assert copies.newest() == 1
    for path in (*directory_of(job).iterdir(), directory_of(job)):
        os.utime(path, (time.time() - 25 * 3600,) * 2)
    delete_old(besides=job)
    assert copies.newest() == 1
    delete_old(besides="another")
    assert not directory_of(job).exists()
    assert MEMORY.exists()


def _killed(_):
    yield np.zeros((1, 2), np.float32)
    raise SystemExit


def _noted(made, name, _):
    for block in range(2):
        made.append(f"{name} block {block}")
        yield np.zeros((1, 1 << 13))
