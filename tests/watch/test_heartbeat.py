"""Heartbeats between ranks over real sockets, in one process."""

import errno
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from kdist.restarts.events import Kind, own_reports
from kdist.watch.activity import Activity, describe_collective
from kdist.watch.failure_detector import Failure, StallTimeout
from kdist.watch.heartbeat import Heartbeat


class Rank:
    """One rank's heartbeat, and what it reported."""

    def __init__(self, rank, size=2):
        self.activity = Activity()
        self.failures, self.warnings = [], []
        self.heartbeat = Heartbeat(self.activity, rank, size, fail=self.failures.append, warn=self.warnings.append)


def until(condition, seconds=20.0):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.05)
    assert condition()


@pytest.fixture
def ranks():
    root, other = Rank(0), Rank(1)
    address = root.heartbeat.listen(everywhere=False)
    other.heartbeat.connect(address)
    root.address = address
    root.heartbeat.start()
    other.heartbeat.start()
    return root, other


def test_ranks_that_finish_one_after_another_are_no_failure(ranks):
    root, other = ranks
    other.heartbeat.finish()
    time.sleep(1.5)
    root.heartbeat.finish()
    time.sleep(1.5)
    assert root.failures == other.failures == root.warnings == []


def test_a_rank_that_finishes_early_ends_the_job(ranks):
    root, other = ranks
    root.activity.begin("barrier", [], 0)
    other.heartbeat.finish()
    until(lambda: root.failures)
    assert "rank 1 has ended its script" in root.failures[0]
    until(lambda: other.failures)
    assert other.failures[0] == "", "rank 0 reports it"


def test_rank_0_may_finish_while_its_last_message_is_on_the_way(ranks):
    root, other = ranks
    for each in ranks:
        each.activity.begin("barrier", [], 0)
    root.activity.end()
    root.heartbeat.finish()
    time.sleep(4.0)
    assert root.failures == other.failures == []


def test_a_rank_that_dies_does_not_end_a_job_whose_other_ranks_go_on(ranks):
    """Not before MPI has told that it is gone."""
    root, other = ranks
    knows = []
    root.heartbeat.has_lost = other.heartbeat.has_lost = lambda: bool(knows)
    knows.append("")
    [connection] = other.heartbeat._peers
    time.sleep(1.5)
    connection.shutdown(socket.SHUT_RDWR)
    time.sleep(5)
    assert root.failures == other.failures == []
    other.heartbeat.pause()
    knows.clear()
    until(lambda: root.failures)
    assert "rank 1 died" in root.failures[0]
    assert other.failures == []


def test_a_heartbeat_that_is_closed_leaves_no_thread_and_no_connection(ranks):
    for each in ranks:
        each.heartbeat.pause()
    for each in ranks:
        each.heartbeat.close()
        each.heartbeat.close()
        assert not each.heartbeat._thread.is_alive()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", ranks[0].address["port"]))
    assert ranks[0].failures == ranks[1].failures == []


def test_a_rank_that_dies_ends_the_job(ranks):
    root, other = ranks
    [connection] = other.heartbeat._peers
    time.sleep(1.5)
    connection.shutdown(socket.SHUT_RDWR)
    until(lambda: root.failures)
    assert "rank 1 died" in root.failures[0]
    until(lambda: other.failures)
    assert "rank 0 died" in other.failures[0], "as far as rank 1 knows"


def test_a_connection_that_cannot_be_accepted_is_not_tried_all_the_time(ranks, monkeypatch):
    root, _ = ranks
    until(lambda: root.heartbeat._peers)
    tries = []

    def refuse(self):
        tries.append(self)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", refuse)
    host, port = root.heartbeat._listener.getsockname()[:2]
    with socket.create_connection((host, port)):
        until(lambda: tries)
        time.sleep(0.5)
    assert len(tries) < 50
    assert root.failures == root.warnings == []


def test_a_heartbeat_that_fails_is_told_of_once_and_the_next_ones_detect_failures(ranks, monkeypatch):
    root, other = ranks
    report, failed = root.activity.report, []

    def fails_twice():
        if len(failed) < 2:
            failed.append(1)
            raise RuntimeError("no report")
        return report()

    monkeypatch.setattr(root.activity, "report", fails_twice)
    until(lambda: len(failed) == 2)
    root.activity.begin("barrier", [], 0)
    other.heartbeat.finish()
    until(lambda: root.failures)
    until(lambda: root.warnings)
    [warning] = root.warnings
    assert warning.startswith("a heartbeat of rank 0 failed; the next ones are tried:\nTraceback")
    assert warning.endswith("RuntimeError: no report")


def test_of_ranks_that_fail_at_once_the_first_that_asks_reports():
    first, second, third = several = [Rank(rank, 3) for rank in range(3)]
    address = first.heartbeat.listen(everywhere=False)
    for each in (second, third):
        each.heartbeat.connect(address)
    for each in several:
        each.heartbeat.start()
    assert [each.heartbeat.may_report(timeout=20.0) for each in (third, second, first, third)] == [
        True,
        False,
        False,
        True,
    ]


def test_without_an_answer_a_rank_reports():
    alone = Rank(1)
    began = time.monotonic()
    assert alone.heartbeat.may_report(timeout=0.1)
    assert time.monotonic() - began >= 0.1


def test_each_stall_of_a_rank_is_warned_of_once(ranks):
    root, other = ranks
    root.heartbeat.stall_timeout = StallTimeout(6.0)
    for number in (1, 2):
        root.activity.begin("barrier", [], 0)
        other.activity._since = time.monotonic()
        until(lambda number=number: len(root.warnings) == number)
        time.sleep(1.5)
        root.activity.end()
        time.sleep(1.5)
    assert len(root.warnings) == 2
    assert root.failures == other.failures == []


def test_a_stall_of_all_ranks_is_blamed_on_none(ranks, monkeypatch):
    root, _ = ranks
    blamed = []
    monkeypatch.setattr(own_reports, "failed", lambda kind, text, rank: blamed.append(rank))
    for ranks_at_fault, is_of_all in (((0, 1), True), ((1,), False)):
        root.heartbeat._handle(Failure(True, ranks_at_fault, "late.", Kind.STALL, is_of_all=is_of_all))
    assert blamed == [None, 1]


def test_heartbeats_go_on_while_a_warning_blocks(ranks, monkeypatch):
    """In a terminal that is stopped, as by Ctrl-S."""
    root, _ = ranks
    goes_on, printed = threading.Event(), []
    monkeypatch.setattr(root.heartbeat, "_warn", lambda text: printed.append(goes_on.wait(20.0)))
    root.heartbeat._handle(Failure(False, (1,), "rank 1 is late."))
    assert printed == []
    goes_on.set()
    until(lambda: printed == [True])


def test_stacks_are_shown_once(ranks):
    root, _ = ranks
    for is_fatal in (False, True):
        root.heartbeat._handle(Failure(is_fatal, (1,), "rank 1 is late.", stacks="\n  train.py:3"))
    until(lambda: root.warnings == ["rank 1 is late.\n  train.py:3"])
    assert root.failures == ["rank 1 is late.\n  The stacks are those of the warning above."]
    root.heartbeat._handle(Failure(True, (1,), "rank 1 is late.", stacks="\n  train.py:4"))
    assert root.failures[1] == "rank 1 is late.\n  train.py:4"


def test_rank_0_is_reached_at_one_of_its_addresses():
    root, other = Rank(0), Rank(1)
    address = root.heartbeat.listen(everywhere=True)
    assert not any(host.startswith("127.") for host in address["hosts"])
    other.heartbeat.connect({**address, "hosts": ["host.invalid", "127.0.0.1"]})
    with pytest.raises(OSError):
        other.heartbeat.connect({**address, "hosts": ["host.invalid"]})
    for each in (root, other):
        each.heartbeat.start()
    time.sleep(1.5)
    assert root.failures == other.failures == []


def test_a_connection_without_the_token_is_closed(ranks):
    root, _ = ranks
    guesses = (b'{"token": "guessed", "rank": 1}\n', b'{"token": "\\u00fc\\ud800", "rank": 1}\n')
    for sent in (*guesses, b"GET / HTTP/1.0\r\n\r\n", b"[]\n", b"[" * 60_000 + b"\n", b"x" * 70_000, b""):
        with socket.create_connection(("127.0.0.1", root.address["port"]), timeout=5) as client:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            client.settimeout(10)
            received = 1
            while received:
                try:
                    received = client.recv(1 << 16)
                except ConnectionResetError:
                    received = b""
    time.sleep(1.5)
    assert root.failures == root.warnings == []
    assert len(root.heartbeat._peers) == 1


def test_calls_are_described_alike_on_all_ranks():
    one = describe_collective("allgather", [("int64", (3, 2))], 0)
    assert one == describe_collective("allgather", [("int64", (7, 2))], 0) == "allgather of 1 tensor(s) int64[any, 2]"
    assert describe_collective("allreduce", [("float32", (3,)), ("int64", (4,))], 1) == (
        "allreduce of 2 tensor(s) float32[3] int64[any]"
    )


SUSPENDED = """
import sys, time
from kdist.watch.failure_detector import StallTimeout
from tests.watch.test_heartbeat import Rank

root, other = Rank(0), Rank(1)
other.heartbeat.connect(root.heartbeat.listen(everywhere=False))
for each in (root, other):
    each.heartbeat.stall_timeout = StallTimeout(8.0, is_strict=True)
    each.heartbeat.start()
root.activity.begin("allreduce", [], 0)
time.sleep(2)
print("started", flush=True)
sys.stdin.readline()
time.sleep(2)
print("failures:", root.failures, other.failures, flush=True)
time.sleep(9)
print("failures:", root.failures, other.failures, flush=True)
"""


def test_a_job_that_is_suspended_goes_on_and_then_detects_failures_as_before():
    with subprocess.Popen(
        [sys.executable, "-c", SUSPENDED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(12)
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "failures: [] []\n"
        assert "rank" in process.stdout.readline(), "rank 0 has waited for longer than the timeout"
        process.kill()


def test_a_rank_that_is_stopped_while_it_detects_failures_leaves_out_that_time(ranks, monkeypatch):
    root, _ = ranks
    report, stopped = root.activity.report, []

    def is_stopped():
        if not stopped:
            time.sleep(7.0)
            stopped.append(1)
        return report()

    root.heartbeat.stall_timeout = StallTimeout(6.0, is_strict=True)
    root.activity.begin("barrier", [], 0)
    monkeypatch.setattr(root.activity, "report", is_stopped)
    until(lambda: stopped)
    time.sleep(1.5)
    assert root.failures == []
    until(lambda: root.failures)
    assert root.failures[0].startswith("rank 1 makes no collective")


LEAVES_A_CHILD = """
import os, time
from tests.watch.test_heartbeat import Rank, until

root = Rank(0)
address = root.heartbeat.listen(everywhere=False)
if os.fork() == 0:
    other = Rank(1)
    other.heartbeat.connect(address)
    other.heartbeat.start()
    if os.fork() == 0:
        os.close(1)
        time.sleep(20)
        os._exit(0)
    time.sleep(2)
    os._exit(0)
root.heartbeat.start()
until(lambda: root.failures, 10)
print(root.failures)
"""


def test_a_rank_that_dies_and_leaves_a_child_ends_the_job():
    """As with `multiprocessing`, whose forked processes have the connections, too."""
    done = subprocess.run([sys.executable, "-c", LEAVES_A_CHILD], stdout=subprocess.PIPE, text=True, timeout=60)
    assert "rank 1" in done.stdout
