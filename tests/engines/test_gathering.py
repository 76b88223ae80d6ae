"""Tests how many messages a gather takes, and that its ranks agree about that, with threads in the place of ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kdist.engines.arrays import gathering
from kdist.errors import EngineError

ROOM = gathering.ROOM


class Ranks:
    """Ranks that gather bytes from each other.

    Args:
        size: int, how many.

    Attributes:
        messages: list of the bytes that rank 0 has received, by message.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.messages: list[int] = []
        self._sent: list[np.ndarray] = [np.empty(0, np.uint8)] * size
        self._all_here = threading.Barrier(size, timeout=60)

    def gather(self, arrays, lengths=None):
        """Returns what each rank gets, or the errors; `arrays` are those of each rank."""

        def run(rank):
            def gather_bytes(mine, counts):
                assert mine.size == counts[rank]
                self._sent[rank] = mine
                self._all_here.wait()
                assert [each.size for each in self._sent] == counts
                received = np.concatenate(self._sent)
                if rank == 0:
                    self.messages.append(received.size)
                self._all_here.wait()
                return received

            try:
                return gathering.allgather(arrays[rank], rank, self.size, gather_bytes, lengths)
            except EngineError as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(run, range(self.size)))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((3, 0, 5), 1),
        ((0, 0, 0), 1),
        ((ROOM // 16, 1, 1), 1),
        ((ROOM // 16 + 1, 1, 1), 2),  # that rank's do not fit
        ((1, 1, ROOM), 2),
        ((0, 1, 1 << 18), 3),  # and so large that one array has a message
    ],
)
def test_small_arrays_travel_beside_their_lengths(rows, expected):
    ranks = Ranks(len(rows))
    sent = [[np.full((n, 2), r, np.float32), np.full((min(n, ROOM), 1), -r, np.float64)] for r, n in enumerate(rows)]
    for received in ranks.gather(sent):
        for array, parts in zip(received, zip(*sent, strict=True), strict=True):
            np.testing.assert_array_equal(array, np.concatenate(parts))
    assert len(ranks.messages) == expected


def test_known_lengths_do_not_travel():
    ranks = Ranks(2)
    received = ranks.gather([[np.arange(rank, dtype=np.int64)] for rank in (1, 2)], [[1, 2]])
    assert [each[0].tolist() for each in received] == [[0, 0, 1]] * 2
    assert ranks.messages == [128]


def test_many_ranks_send_little_that_may_not_be_needed():
    ranks = Ranks(20)
    rows = gathering.ROOM_OF_ALL // 20 + 1
    received = ranks.gather([[np.zeros(rows, np.uint8)]] * 20)
    assert {each[0].size for each in received} == {20 * rows}
    assert ranks.messages[0] <= gathering.ROOM_OF_ALL + 64 * 20
    assert len(ranks.messages) == 2


@pytest.mark.parametrize("rows", [1, ROOM])
def test_other_widths_are_refused_on_all_ranks(rows):
    errors = Ranks(2).gather([[np.zeros((rows, width), np.float32)] for width in (2, 3)])
    for rank, error in enumerate(errors):
        assert isinstance(error, EngineError)
        assert f"8 bytes a row of tensor 0 on rank 0 and 12 on rank 1; on this rank {rank} " in str(error)


@pytest.mark.parametrize("other", [np.zeros((1, 2), np.int32), np.zeros((1, 1, 2), np.float32)])
def test_rows_of_another_kind_are_refused_on_all_ranks(other):
    for rank, error in enumerate(Ranks(2).gather([[np.zeros((3, 2), np.float32)], [other]])):
        assert isinstance(error, EngineError)
        expected = "8 bytes a row of tensor 0 on rank 0 and as many of another dtype or other dimensions on rank 1;"
        assert f"{expected} on this rank {rank} " in str(error)
