"""Sums and gathers over ranks of one host, in memory that all of them map; standard library and NumPy."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kdist.cluster.forked_child import call_in_forked_children
from kdist.engines.arrays import fusion, gathering, scattering
from kdist.engines.arrays.fusion import Array
from kdist.errors import EngineError

PIECE_BYTES = 1 << 20
"""How much of a buffer each rank writes at a time: so much stays in the processor's cache."""

FAILURE = "A collective failed in shared memory: "

# Used in turn. Having synchronised, a rank reads the others' sums of the piece before, and then writes the next piece,
# while another rank may still be reading.
_NUM_SLOTS = 3
BARRIER, END = 1, 2
"""The words of ranks that wait for each other without a buffer, at a barrier and at the end of their scripts."""

_GATHER = -1  # the word of ranks that gather; that of ranks which sum has their number of bytes and the dtype
_SCATTER = -2  # less the same, the word of ranks which sum rows of their own
_NAMES = {BARRIER: "a barrier", END: "the end of the script", _GATHER: "a gathering"}
_TOKEN_BYTES = 16
_AWAKE = 0.0002  # seconds that a rank waits for a word before it sleeps: to wake up takes longer than most messages
_LONGEST_POLL = 2**31 - 1  # milliseconds
_WORD = struct.Struct("=q")


class SharedMemory:
    """A region of memory for each rank, which all ranks map, and a pipe for each pair of ranks.

    A rank writes a piece of its buffer into its region; every rank sums its part of all ranks' pieces, in rank order,
    so that all get the same bits, and writes that into its region, from which the others copy it once they have
    written the next piece. Before a rank reads the regions of others, all ranks synchronise: each writes a word into
    the pipe to every other, and waits for theirs. Regions and pipes have no names, and are freed when the last process
    that holds them ends.

    Made by `open`.

    Args:
        rank: int, this process's number.
        regions: sequence of memory maps, one a rank.
        to: sequence of file descriptors, the pipes to each rank; the item at this rank's own index is not used.
        of: sequence of file descriptors, the pipes from each rank.
        timeout: float or `None`, seconds that a rank waits for another one.
        names: sequence of ints, the ranks' numbers in error messages.

    Attributes:
        rank: int.
        size: int, the number of ranks.
    """

    def __init__(
        self,
        rank: int,
        regions: Sequence[mmap.mmap],
        to: Sequence[int],
        of: Sequence[int],
        timeout: float | None,
        names: Sequence[int],
    ) -> None:
        self._names = names
        self.rank, self.size = rank, len(regions)
        self._regions = [np.frombuffer(region, np.uint8) for region in regions]
        others = [other for other in range(self.size) if other != rank]
        self._to = {other: to[other] for other in others}
        self._of = {other: of[other] for other in others}
        self._polls = {pipe: select.poll() for pipe in self._of.values()}
        for pipe, poll in self._polls.items():
            poll.register(pipe, select.POLLIN)
        self._timeout = timeout
        self._slot = 0
        self._one_at_a_time = threading.Lock()
        call_in_forked_children(self._close_copies)

    @classmethod
    def open(
        cls,
        rank: int,
        size: int,
        gather: Callable[[Any], list[Any]],
        timeout: float | None = None,
        names: Sequence[int] | None = None,
    ) -> SharedMemory | None:
        """Maps the memory of all ranks.

        Collective: every rank must call this, in the same order.

        Args:
            rank: int, this process's number.
            size: int, the number of ranks.
            gather: function that returns every rank's value, in rank order; as `Engine.gather_objects`.
            timeout: float or `None`, seconds that a rank may wait for another one, later.
            names: sequence of ints, the ranks' numbers in error messages; by default from 0.

        Returns:
            A `SharedMemory`, the same for all ranks, or `None` on all of them if one rank cannot map the memory of
            another: on another host, in another container, or another user's.
        """
        token = secrets.token_bytes(_TOKEN_BYTES)
        with contextlib.ExitStack() as until_opened:
            pipes = []
            try:
                memory = os.memfd_create("kdist")
                until_opened.callback(os.close, memory)
                os.posix_fallocate(memory, 0, _region_bytes(size))  # raises if there is no room
                os.pwrite(memory, token, 0)
                for _ in range(size):
                    pipes.append(os.pipe())
                    until_opened.callback(os.close, pipes[-1][1])  # so that a read ends when the other rank does
            except (OSError, AttributeError):
                mine = None
            else:
                mine = [os.getpid(), token.hex(), memory, [write for _, write in pipes]]
            everyone = gather(mine)
            regions: list[mmap.mmap] = []
            to: list[int] = []
            with contextlib.suppress(OSError, TypeError):
                for theirs in everyone:
                    regions.append(_region(theirs, size))
                    to.append(os.open(f"/proc/{theirs[0]}/fd/{theirs[3][rank]}", os.O_WRONLY))
            is_shared_by_all = all(gather(len(to) == size))
        if is_shared_by_all:
            return cls(rank, regions, to, [read for read, _ in pipes], timeout, names or range(size))
        for descriptor in [*to, *(read for read, _ in pipes)]:
            os.close(descriptor)
        return None

    def _close_copies(self) -> None:
        """Closes a child's copies of the pipes: a read on another rank ends with this one, although the child lives."""
        for pipes in (self._to, self._of):  # forgotten, for in a child of the child the numbers are of other files
            while pipes:
                os.close(pipes.popitem()[1])

    def sum(self, *buffers: Array) -> None:
        """Sums buffers over all ranks, in place.

        Collective: every rank must call this, in the same order.

        Args:
            *buffers: 1-D arrays of any numeric dtype, whose sizes are equal on all ranks.

        Raises:
            EngineError: if the ranks' sizes differ, a rank has ended, or one does not take part in time.
        """
        with self._one_at_a_time:
            for buffer in buffers:
                self._sum_buffer(buffer)

    def meet(self, word: int) -> None:
        """Returns when all ranks have called it.

        Collective: every rank must call this, in the same order.

        Args:
            word: int, `BARRIER` or `END`.

        Raises:
            EngineError: if a rank does something else, has ended, or does not take part in time.
        """
        with self._one_at_a_time:
            self._synchronize(word)

    def reduce_scatter(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns this rank's rows of the sums; see `Engine.reduce_scatter`.

        Collective: every rank must call this, in the same order.

        Args:
            arrays: sequence of arrays of at least one dimension and of any numeric dtype, whose shapes and dtypes are
                equal on all ranks.

        Raises:
            EngineError: as `sum`.
        """
        with self._one_at_a_time:
            return scattering.reduce_scatter(arrays, self.rank, self.size, self._exchange)

    def allgather(self, arrays: Sequence[Array], lengths: gathering.Lengths | None = None) -> list[Array]:
        """Concatenates arrays over all ranks along their first axis; see `Engine.allgather`.

        Collective: every rank must call this, in the same order.

        Args:
            arrays: sequence of arrays of any dtypes, whose dimensions but the first are equal on all ranks.
            lengths: the number of rows of each array on each rank, if known; else it costs a message.

        Raises:
            EngineError: if the rows of the ranks have other widths, or as `gather_bytes`.
        """
        return gathering.allgather(arrays, self.rank, self.size, self.gather_bytes, lengths)

    def gather_bytes(self, mine: Array, counts: list[int]) -> Array:
        """Returns all ranks' bytes, in rank order.

        Collective: every rank must call this, in the same order.

        Args:
            mine: 1-D array of `uint8`.
            counts: list of ints, the lengths of all ranks' bytes.

        Raises:
            EngineError: if a rank does something else, has ended, or does not take part in time.
        """
        everyone = fusion.empty(sum(counts), np.uint8)
        parts = np.split(everyone, np.cumsum(counts)[:-1])
        with self._one_at_a_time:
            for start in range(0, max(*counts, 1), PIECE_BYTES):
                place = self._next_slot()
                piece = mine[start : start + PIECE_BYTES]
                self._regions[self.rank][place : place + piece.size] = piece
                self._synchronize(_GATHER)
                for region, theirs in zip(self._regions, parts, strict=True):
                    part = theirs[start : start + PIECE_BYTES]
                    part[:] = region[place : place + part.size]
        return everyone

    def _exchange(self, sent: Sequence[Array], memory: Sequence[Array]) -> Sequence[Array]:
        """Writes what the other ranks sum into the region, and returns theirs; see `scattering.Exchange`."""
        place = self._next_slot()
        starts = [place]
        for each in sent:
            starts.append(starts[-1] + each.nbytes)
        own = self._regions[self.rank]
        for rank, each in enumerate(sent):
            if rank != self.rank:
                own[starts[rank] : starts[rank + 1]] = each.view(np.uint8)
        self._synchronize(_SCATTER - _word(starts[-1] - place, sent[0].dtype))
        first, last = starts[self.rank : self.rank + 2]
        mine = sent[self.rank]
        return [
            mine if rank == self.rank else region[first:last].view(mine.dtype)
            for rank, region in enumerate(self._regions)
        ]

    @np.errstate(over="ignore", invalid="ignore")  # as C sums in a graph: a loss scale that is too large is no error
    def _sum_buffer(self, buffer: Array) -> None:
        regions = [region.view(buffer.dtype) for region in self._regions]
        own = regions[self.rank]
        step = PIECE_BYTES // buffer.itemsize
        before: tuple[Array, int] | None = None  # a piece whose parts all ranks sum, and where the sums are
        for start in range(0, max(buffer.size, 1), step):  # an empty buffer has a piece: that of another rank may, too
            piece = buffer[start : start + step]
            written = self._next_slot() // buffer.itemsize
            bounds = fusion.part_bounds(piece.size, self.size)
            first, last = bounds[self.rank], bounds[self.rank + 1]
            own[written : written + first] = piece[:first]  # what the other ranks sum
            own[written + last : written + piece.size] = piece[last:]
            self._synchronize(_word(buffer.nbytes, buffer.dtype))
            if before is not None:
                self._take(regions, *before)
            part = own[written + step : written + step + last - first]
            terms = [region[written + first : written + last] for region in regions]
            terms[self.rank] = piece[first:last]
            np.add(terms[0], terms[1], out=part)
            for term in terms[2:]:
                np.add(part, term, out=part)
            before = piece, written + step
        self._synchronize(_word(buffer.nbytes, buffer.dtype))
        if before is not None:
            self._take(regions, *before)

    def _take(self, regions: Sequence[Array], piece: Array, summed: int) -> None:
        """Copies the ranks' sums of the parts of a piece into the piece."""
        bounds = fusion.part_bounds(piece.size, self.size)
        for region, start, stop in zip(regions, bounds, bounds[1:], strict=False):
            piece[start:stop] = region[summed : summed + stop - start]

    def _next_slot(self) -> int:
        """Returns where the next slot begins in each region."""
        self._slot = (self._slot + 1) % _NUM_SLOTS
        return self._slot * _slot_bytes(self.size)

    def _synchronize(self, word: int) -> None:
        """Returns when all ranks have called it, with the same word."""
        for rank, pipe in self._to.items():
            try:
                os.write(pipe, _WORD.pack(word))
            except BrokenPipeError:
                raise self._failure(f"rank {self._names[rank]} has ended") from None
        words = {}
        for rank, pipe in self._of.items():
            if not self._is_readable(pipe):
                raise self._failure(f"no answer from rank {self._names[rank]} within {self._timeout:g} s")
            received = os.read(pipe, _WORD.size)
            if not received:
                raise self._failure(f"rank {self._names[rank]} has ended")
            (words[rank],) = _WORD.unpack(received)
        for rank, theirs in words.items():  # once all are read, so that the next call finds none of them
            if theirs != word:
                raise self._failure(f"{_said(word)} on this rank, and {_said(theirs)} on rank {self._names[rank]}")

    def _is_readable(self, pipe: int) -> bool:
        """Returns when there is a word to read, or it is too late for one."""
        poll = self._polls[pipe]
        asleep_from = time.perf_counter() + _AWAKE
        while time.perf_counter() < asleep_from:
            if poll.poll(0):
                return True
            os.sched_yield()  # the other rank may need this core
        return bool(poll.poll(None if self._timeout is None else min(self._timeout * 1000, _LONGEST_POLL)))

    def _failure(self, what: str) -> EngineError:
        return EngineError(f"{FAILURE}{what}")


def _word(num_bytes: int, dtype: np.dtype[Any]) -> int:
    """Returns what ranks that sum compare: equal numbers of bytes may be of other dtypes."""
    return num_bytes << 16 | ord(dtype.kind) << 8 | dtype.itemsize


def _said(word: int) -> str:
    if word in _NAMES:
        return _NAMES[word]
    by_rows = " by rows" if word <= _SCATTER else ""
    word = _SCATTER - word if by_rows else word
    return f"{word >> 16} bytes of {np.dtype(f'{chr(word >> 8 & 0xFF)}{word & 0xFF}')} to sum{by_rows}"


def _slot_bytes(size: int) -> int:
    """Returns the bytes of a region that a piece needs: the piece itself, and the sum of a part of it."""
    return PIECE_BYTES + (PIECE_BYTES // size // fusion.ALIGNMENT + 1) * fusion.ALIGNMENT


def _region_bytes(size: int) -> int:
    return _NUM_SLOTS * _slot_bytes(size)


def _region(theirs: Sequence[Any], size: int) -> mmap.mmap:
    """Maps a rank's memory.

    Raises:
        OSError: if it cannot be mapped here.
    """
    pid, token, memory, _ = theirs
    descriptor = os.open(f"/proc/{pid}/fd/{memory}", os.O_RDWR)
    try:
        if os.pread(descriptor, _TOKEN_BYTES, 0).hex() != token:
            raise OSError("another process has this process id here")
        return mmap.mmap(descriptor, _region_bytes(size))
    finally:
        os.close(descriptor)
