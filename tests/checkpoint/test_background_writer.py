"""Checkpoints that are written while training goes on."""

import os
import sys
import threading

import numpy as np
import pytest

from kdist.checkpoint.storage.background_writer import BackgroundWriter
from kdist.errors import CheckpointError


def checkpoint(number):
    return {"part": {"number": number, "values": np.full(2, number)}}


def test_of_those_that_come_while_one_is_written_the_newest_is_written_too():
    writer, began, may_end, written = BackgroundWriter(), threading.Event(), threading.Event(), []

    def write(each):
        began.set()
        assert may_end.wait(60)
        written.append((each["part"]["number"], each["part"]["values"].tolist()))

    for number in (1, 2, 3):
        now = checkpoint(number)
        waited = threading.Thread(target=writer.write, args=(write, now))
        waited.start()
        waited.join(60 if number == 1 else 5)
        if waited.is_alive():
            may_end.set()
            pytest.fail(f"the step of checkpoint {number} waits until another is written")
        now["part"]["values"][:] = 9  # the next steps change it
        assert began.wait(60)
    may_end.set()
    writer.wait()
    assert written == [(1, [1, 1]), (3, [3, 3])]
    writer.write(write, checkpoint(4))
    writer.wait()
    assert written[-1] == (4, [4, 4])


def test_what_cannot_be_written_is_told_at_the_next_one_or_in_the_end():
    writer = BackgroundWriter()

    def fail(_):
        raise CheckpointError("there is no room")

    writer.write(fail, checkpoint(1))
    with pytest.raises(CheckpointError, match="no room"):
        writer.wait()
    writer.wait()


def test_the_next_copy_takes_the_memory_of_one_that_is_written():
    writer, places, is_written = BackgroundWriter(), [], threading.Event()

    def write(each):
        places.append(each["part"]["values"].ctypes.data)
        is_written.set()

    for number in (1, 2):
        writer.write(write, checkpoint(number))
        assert is_written.wait(60)
        is_written.clear()
        while writer._thread is not None:  # its memory is free then
            threading.Event().wait(0.01)
    writer.wait()
    assert places[0] == places[1]
    assert not writer._written, "the memory is given back when the training ends"


def test_a_copy_of_another_shape_is_its_own():
    writer, written = BackgroundWriter(), []
    for values in (np.zeros(2), np.ones(3), np.full(3, 2, "int64")):
        writer.write(lambda each: written.append(each["part"]["values"].copy()), {"part": {"values": values}})
        while writer._thread is not None:
            threading.Event().wait(0.01)
    writer.wait()
    assert [(each.tolist(), each.dtype) for each in written] == [
        ([0, 0], "float64"),
        ([1, 1, 1], "float64"),
        ([2, 2, 2], "int64"),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have the niceness of their process elsewhere")
def test_the_training_comes_before_what_is_written_beside_it():
    writer, niceness = BackgroundWriter(), []
    writer.write(lambda _: niceness.append(os.nice(0)), checkpoint(1))
    writer.wait()
    assert niceness[0] > os.nice(0) or niceness[0] == 19  # the lowest priority that there is
