"""What is written under a temporary name; on several ranks: `tests/training/behaviours_files.py`."""

import concurrent.futures
import contextlib
import io
from pathlib import Path

import numpy as np
import pytest

from kdist.checkpoint.storage.whole_files import write_whole
from kdist.engines.single import SingleEngine
from kdist.state.versions import Versions


def write_directory(filepath, text):
    Path(filepath, "inner").mkdir(parents=True)
    Path(filepath, "inner", "file").write_text(text)


def text_of(path):
    assert [each.name for each in path.parent.iterdir()] == [path.name]  # nothing else is left
    return Path(path, "inner", "file").read_text()


def test_a_directory_of_the_same_version_is_left_alone(tmp_path):
    path = tmp_path / "saved"
    write_whole(lambda _: 7, write_directory, path, "first rank")
    before = path.stat().st_ino
    write_whole(lambda _: 7, write_directory, path, "second rank")
    assert (text_of(path), path.stat().st_ino) == ("first rank", before)


@pytest.mark.parametrize("version_of", [lambda _: 8, None])
def test_a_directory_of_another_version_is_replaced(tmp_path, version_of):
    path = tmp_path / "saved"
    write_whole(lambda _: 7, write_directory, path, "old")
    write_whole(version_of, write_directory, path, "new")
    assert text_of(path) == "new"


@pytest.mark.parametrize("is_mounted", [False, True])
def test_what_else_is_in_a_directory_stays(tmp_path, monkeypatch, is_mounted):
    """A directory that is a mount point, as in a container, cannot be replaced as a whole."""
    path = tmp_path / "out"
    monkeypatch.setattr("os.path.ismount", lambda each: is_mounted and Path(each) == path)
    (path / "logs").mkdir(parents=True)
    (path / "log.csv").write_text("1")
    others = [(path / name).stat().st_ino for name in ("logs", "log.csv")]
    for version, text, expected in (
        (7, "first", "first"),
        (7, "second", "first"),
        (8, "third", "third"),
        (None, "x", "x"),
    ):
        write_whole(None if version is None else lambda _, it=version: it, write_directory, path, text)
        assert (path / "inner" / "file").read_text() == expected
        assert sorted(each.name for each in path.iterdir()) == ["inner", "log.csv", "logs"]
        assert [(path / name).stat().st_ino for name in ("logs", "log.csv")] == others, "they are not touched"
        (path / "logs" / text).write_text("a step")  # which says nothing of the version
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("has_others", [False, True])
def test_ranks_that_write_at_once_leave_one_content_where_nothing_is_locked(tmp_path, monkeypatch, has_others):
    """As on network file systems without locks."""
    path = tmp_path / "out"
    monkeypatch.setattr("kdist.checkpoint.storage.whole_files.file_lock", lambda _: contextlib.nullcontext())
    if has_others:
        path.mkdir()
        (path / "log.csv").write_text("1")

    def write(rank):
        for number in range(20):
            write_whole(lambda _, it=number: it, write_directory, path, f"{number} of {rank}")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(write, rank) for rank in range(4)]:
            done.result()
    assert (path / "inner" / "file").read_text().startswith("19 of")
    assert sorted(each.name for each in path.iterdir()) == ["inner", *(["log.csv"] if has_others else [])]
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_method_without_a_path_writes_by_itself(tmp_path):
    assert write_whole(None, lambda *args: args, tmp_path / "model") == (tmp_path / "model",)
    assert write_whole(None, lambda where: where, tmp_path / "model") == tmp_path / "model"


def write_or_ask(filepath, text, overwrite=True):
    """Writes as Keras does, which asks by `input()`."""
    if not overwrite and Path(filepath).exists():
        raise EOFError
    Path(filepath).write_text(text)


@pytest.mark.parametrize("write", [write_or_ask, write_directory])
def test_a_file_that_another_rank_has_just_written_is_not_asked_about(tmp_path, write):
    """Each rank's count of its writes to a path agrees with the others', whether it wrote or found the file."""
    path, weights = tmp_path / "saved", [np.ones(3)]
    ranks = [Versions(SingleEngine()), Versions(SingleEngine())]
    ranks[1]._job = ranks[0]._job

    def save(rank, text, **kwargs):
        write_whole(lambda path: ranks[rank].next(path, weights), write, path, text, **kwargs)
        return (path if path.is_file() else path / "inner" / "file").read_text()

    other = {"overwrite": False} if write is write_or_ask else {}
    assert [save(0, "first rank", **other), save(1, "second rank", **other)] == ["first rank"] * 2
    path.rename(tmp_path / "moved")
    assert [save(1, "second rank", **other), save(0, "first rank", **other)] == ["second rank"] * 2
    if other:
        with pytest.raises(EOFError):
            save(0, "first rank again", **other)


def test_a_write_that_fails_leaves_the_old_directory(tmp_path):
    def fail(filepath):
        write_directory(filepath, "half")
        raise OSError("no space left")

    path = tmp_path / "saved"
    write_whole(None, write_directory, path, "old")
    with pytest.raises(OSError, match="no space"):
        write_whole(lambda _: 7, fail, path)
    assert text_of(path) == "old"


def test_the_directory_around_is_made_as_keras_makes_it(tmp_path):
    write_whole(None, write_directory, f"{tmp_path}/made/here/saved/", "new")
    assert text_of(tmp_path / "made" / "here" / "saved") == "new"
    with pytest.raises(FileNotFoundError, match="missing"):
        write_whole(None, lambda filepath: Path(filepath).write_text("x"), tmp_path / "missing" / "model.keras")


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    """As Keras writes through links. The new files are made beside the old ones: a rename needs one file system."""
    real, links = tmp_path / "real", tmp_path / "links"
    links.mkdir()
    (links / "latest.keras").symlink_to("../real/step3.keras")  # whose directory Keras does not make
    with pytest.raises(FileNotFoundError, match="latest"):
        write_whole(None, write_or_ask, links / "latest.keras", "new")
    real.mkdir()
    (links / "saved").symlink_to(real / "run3")
    for text in ("old", "new"):
        write_whole(None, write_or_ask, links / "latest.keras", text)
        write_whole(None, write_directory, f"{links}/saved/", text)
    assert sorted(each.name for each in real.iterdir()) == ["run3", "step3.keras"]
    assert (real / "step3.keras").read_text() == (real / "run3" / "inner" / "file").read_text() == "new"
    assert all(each.is_symlink() for each in links.iterdir())

    def write_in_parts(filepath):  # as `save_weights` with `max_shard_size`
        for name in (filepath.name, "part_0"):
            (filepath.parent / name).write_text("new")

    write_whole(None, lambda filepath: write_in_parts(Path(filepath)), links / "latest.keras")
    assert sorted(each.name for each in links.iterdir()) == ["latest.keras", "part_0", "saved"]


def test_an_open_file_is_written_to():
    file = io.BytesIO()
    write_whole(None, lambda filepath: filepath.write(b"x"), file)
    assert file.getvalue() == b"x"


def test_versions_tell_writes_jobs_and_weights_apart(tmp_path):
    ours, theirs = Versions(SingleEngine()), Versions(SingleEngine())
    weights = [np.ones(3), np.zeros(2)]
    first, second = ours.next(tmp_path, weights), ours.next(tmp_path, weights)
    others = [ours.next(tmp_path / "other", [np.ones(3), np.ones(2)]), theirs.next(tmp_path, weights)]
    assert len({first, second, *others}) == 4
    assert ours.next(tmp_path / ".." / tmp_path.name / "new", weights) == first
