"""Ranks that tell rank 0 what they do, over real sockets, in one process."""

import socket
import time

import pytest

from kdist.watch.activity import Activity, described
from kdist.watch.link import Watch


class Rank:
    """One rank's watch, and what it was told to do."""

    def __init__(self, rank, size=2):
        self.activity = Activity()
        self.ends, self.warnings = [], []
        self.watch = Watch(self.activity, rank, size, end=self.ends.append, warn=self.warnings.append)


def until(condition, seconds=20.0):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.05)
    assert condition()


@pytest.fixture
def ranks():
    root, other = Rank(0), Rank(1)
    address = root.watch.listen(everywhere=False)
    other.watch.connect(address)
    root.address = address
    root.watch.start()
    other.watch.start()
    return root, other


def test_ranks_that_end_in_turn_are_left_alone(ranks):
    root, other = ranks
    other.watch.finish()
    time.sleep(1.5)
    root.watch.finish()
    time.sleep(1.5)
    assert root.ends == other.ends == root.warnings == []


def test_a_rank_that_ended_too_early_ends_the_job(ranks):
    root, other = ranks
    root.activity.begin("barrier", [], 0)
    other.watch.finish()
    until(lambda: root.ends)
    assert "rank 1, which has ended" in root.ends[0]
    until(lambda: other.ends)
    assert other.ends[0] == "", "rank 0 has the word"


def test_a_rank_that_dies_ends_the_job(ranks):
    root, other = ranks
    [connection] = other.watch._peers
    time.sleep(1.5)
    connection.shutdown(socket.SHUT_RDWR)
    until(lambda: root.ends)
    assert "rank 1 has died" in root.ends[0]
    until(lambda: other.ends)
    assert "rank 0 has died" in other.ends[0], "for all that rank 1 knows"


def test_rank_0_is_found_under_one_of_its_addresses():
    root, other = Rank(0), Rank(1)
    address = root.watch.listen(everywhere=True)
    assert not any(host.startswith("127.") for host in address["hosts"])
    other.watch.connect({**address, "hosts": ["host.invalid", "127.0.0.1"]})
    with pytest.raises(OSError):
        other.watch.connect({**address, "hosts": ["host.invalid"]})
    for each in (root, other):
        each.watch.start()
    time.sleep(1.5)
    assert root.ends == other.ends == []


def test_a_stranger_is_not_listened_to(ranks):
    root, _ = ranks
    for said in (b'{"token": "guessed", "rank": 1}\n', b"GET / HTTP/1.0\r\n\r\n", b"[]\n", b"x" * 70_000, b""):
        with socket.create_connection(("127.0.0.1", root.address["port"]), timeout=5) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(10)
            received = 1
            while received:
                try:
                    received = stranger.recv(1 << 16)
                except ConnectionResetError:
                    received = b""
    time.sleep(1.5)
    assert root.ends == []
    assert len(root.watch._peers) == 1


def test_calls_are_described_alike_on_all_ranks():
    one = described("allgather", [("int64", (3, 2))], 0)
    assert one == described("allgather", [("int64", (7, 2))], 0) == "allgather of 1 tensor(s) int64[any, 2]"
    assert described("allreduce", [("float32", (3,)), ("int64", (4,))], 1) == (
        "allreduce of 2 tensor(s) float32[3] int64[any]"
    )
