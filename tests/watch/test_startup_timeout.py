"""The startup timeout without ranks; `tests/test_failures.py` has whole jobs."""

import logging
import threading

from kdist.watch.startup_timeout import startup_timeout

FOREVER = 60.0  # seconds; nobody waits that long


def test_a_slow_start_is_logged_and_then_ends_the_job(caplog):
    messages, ended = [], threading.Event()

    def fail(message):
        messages.append(message)
        ended.set()

    with caplog.at_level(logging.WARNING, "kdist"), startup_timeout(0.2, 1, 3, fail):
        assert ended.wait(FOREVER)
    assert "rank 1 of 3 waits for ranks that have not started: those that do not log this. If all log it" in caplog.text
    assert len(messages) == 1
    assert "within 0.2 s" in messages[0]
    assert "start_timeout" in messages[0]


def test_a_start_in_time_logs_nothing(caplog):
    messages = []
    with startup_timeout(FOREVER, 0, 2, messages.append):
        [waiting] = [each for each in threading.enumerate() if each.name == "kdist-start"]
    waiting.join(FOREVER)
    assert not waiting.is_alive()
    assert not messages
    assert not caplog.text


def test_a_start_that_raises_ends_the_thread():
    messages = []
    try:
        with startup_timeout(FOREVER, 0, 2, messages.append):
            [waiting] = [each for each in threading.enumerate() if each.name == "kdist-start"]
            raise ValueError
    except ValueError:
        waiting.join(FOREVER)
    assert not waiting.is_alive()
    assert not messages
