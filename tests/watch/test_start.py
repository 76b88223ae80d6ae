"""The wait for all ranks, without ranks: `tests/test_failures.py` holds whole jobs."""

import logging
import threading

from kdist.watch.start import limited

FOREVER = 60.0  # seconds; nobody waits that long


def test_a_start_that_takes_too_long_is_announced_and_then_ended(caplog):
    said, ended = [], threading.Event()

    def end(text):
        said.append(text)
        ended.set()

    with caplog.at_level(logging.WARNING, "kdist"), limited(0.2, 1, 3, end):
        assert ended.wait(FOREVER)
    assert "rank 1 of 3 waits for ranks that have not started" in caplog.text
    assert len(said) == 1
    assert "within 0.2 s" in said[0]
    assert "start_timeout" in said[0]


def test_a_start_in_time_is_no_matter(caplog):
    said = []
    with limited(FOREVER, 0, 2, said.append):
        [waiting] = [each for each in threading.enumerate() if each.name == "kdist-start"]
    waiting.join(FOREVER)
    assert not waiting.is_alive()
    assert not said
    assert not caplog.text


def test_a_start_that_fails_waits_for_nobody():
    said = []
    try:
        with limited(FOREVER, 0, 2, said.append):
            [waiting] = [each for each in threading.enumerate() if each.name == "kdist-start"]
            raise ValueError
    except ValueError:
        waiting.join(FOREVER)
    assert not waiting.is_alive()
    assert not said
