"""Checkpoints that are written while training goes on."""

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
