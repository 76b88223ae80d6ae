"""The stacks of threads."""

import errno
import os
import tempfile
import threading
from pathlib import Path

import pytest

import kdist
from kdist.watch.activity import Activity
from kdist.watch.stacks import Frame, stacks_of_threads


def no_file(*_):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("has_memory_files", [True, False])
def test_each_thread_has_its_frames_from_the_outermost_on(has_memory_files, monkeypatch):
    if not has_memory_files:  # as in a Python built against an old glibc
        monkeypatch.delattr(os, "memfd_create")
    ends, has_begun = threading.Event(), threading.Event()
    code = compile("def waits():\n    begun()\n    ends()\n", "/home/ü/größe 木.py", "exec")
    scope = {"ends": ends.wait, "begun": has_begun.set}
    exec(code, scope)
    thread = threading.Thread(target=scope["waits"])
    thread.start()
    has_begun.wait()
    try:
        found = stacks_of_threads()
    finally:
        ends.set()
        thread.join()
    assert Frame("/home/ü/größe 木.py", 3, "waits") in found[thread.ident]
    assert found[thread.ident][-1].name == "wait"
    own = [frame.name for frame in found[threading.get_ident()]]
    assert own[-2:] == ["test_each_thread_has_its_frames_from_the_outermost_on", "stacks_of_threads"]


def test_without_a_file_there_are_no_stacks_and_the_report_has_the_rest(monkeypatch):
    monkeypatch.setattr(os, "memfd_create", no_file)
    assert threading.get_ident() in stacks_of_threads()
    monkeypatch.setattr(tempfile, "TemporaryFile", no_file)
    assert stacks_of_threads() == {}
    activity = Activity()
    activity._since -= 60.0
    with activity.running("model.fit"):
        report = activity.report()
    assert (report["stack"], report["threads"]) == ([], [])
    assert report["place"].startswith("`model.fit`, test_stacks.py:")


def test_frame_objects_of_other_threads_are_not_touched():
    """While TensorFlow traced, that ended 2 of 2 processes within 13,000 stacks; no test is as long."""
    places = [
        file.name for file in Path(kdist.__file__).parent.rglob("*.py") if "._current_frames(" in file.read_text()
    ]
    assert places == []
