"""Gathers arrays of ranks that have other numbers of rows, small ones in one message; pure NumPy."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from kdist.engines.arrays import fusion
from kdist.engines.arrays.fusion import Array
from kdist.errors import EngineError

GatherBytes = Callable[[Array, list[int]], Array]
"""Takes this rank's bytes and the numbers of bytes of all ranks; returns all ranks' bytes, in rank order."""

Lengths = Sequence[Sequence[int]]
"""For each array, its number of rows on each rank."""

ROOM = 4096
"""The most bytes of a rank that travel beside its lengths: a second message takes longer than so many bytes do."""

ROOM_OF_ALL = 1 << 16
"""The most that all ranks may send so: all receive it, needed or not."""


def allgather(
    arrays: Sequence[Array], rank: int, size: int, gather_bytes: GatherBytes, lengths: Lengths | None = None
) -> list[Array]:
    """Concatenates arrays over all ranks along their first axis; see `Engine.allgather`.

    Collective: every rank must call this, in the same order.

    Args:
        arrays: sequence of arrays of any dtypes, whose dimensions but the first are equal on all ranks.
        rank: int, this process's number.
        size: int, the number of ranks.
        gather_bytes: `GatherBytes`. Memory that it returns is this function's own.
        lengths: `Lengths` or `None`, which costs a message if the arrays have no room in it.

    Returns:
        A list of arrays, one for each of `arrays`.

    Raises:
        EngineError: if the rows of the ranks have other widths.
    """
    if not arrays:
        return []
    dtypes = [array.dtype for array in arrays]
    tails = [array.shape[1:] for array in arrays]
    widths = [math.prod(tail) * dtype.itemsize for tail, dtype in zip(tails, dtypes, strict=True)]
    if lengths is None:
        lengths, gathered = _with_lengths(arrays, widths, rank, size, gather_bytes)
        if gathered is not None:
            return gathered
    is_large = [sum(counts) * width >= fusion.LARGE_BYTES for counts, width in zip(lengths, widths, strict=True)]
    results: list[Array] = list(arrays)
    small = [place for place, is_it in enumerate(is_large) if not is_it]
    shapes = [[(lengths[place][each], *tails[place]) for place in small] for each in range(size)]
    sizes = [fusion.byte_length(each, [dtypes[place] for place in small]) for each in shapes]
    if small:
        buffer = gather_bytes(fusion.to_bytes([arrays[place] for place in small]), sizes)
        starts = np.cumsum([0, *sizes])
        by_rank = [
            fusion.from_bytes(buffer[start : start + length], each, [dtypes[place] for place in small])
            for start, length, each in zip(starts, sizes, shapes, strict=False)
        ]
        for place, parts in zip(small, zip(*by_rank, strict=True), strict=True):
            results[place] = np.concatenate(parts)
    for place, width in enumerate(widths):  # into place, without another copy
        if is_large[place]:
            mine = np.ascontiguousarray(arrays[place]).reshape(-1).view(np.uint8)
            received = gather_bytes(mine, [count * width for count in lengths[place]])
            results[place] = received.view(dtypes[place]).reshape(sum(lengths[place]), *tails[place])
    return results


def _with_lengths(
    arrays: Sequence[Array], widths: list[int], rank: int, size: int, gather_bytes: GatherBytes
) -> tuple[Lengths, list[Array] | None]:
    """Returns the lengths; and the results, if the arrays of each rank have room beside its lengths."""
    shapes, dtypes, count = [array.shape for array in arrays], [array.dtype for array in arrays], len(arrays)
    num_bytes = fusion.byte_length(shapes, dtypes)
    # What a row is, beside the lengths: rows of other widths or dtypes would be mixed unnoticed.
    rows = [zlib.crc32(f"{array.shape[1:]} {array.dtype.name}".encode()) for array in arrays]
    head = np.array([*[len(array) for array in arrays], *rows, *widths, num_bytes], np.int64)
    room, start = min(ROOM, ROOM_OF_ALL // size), fusion.byte_length([head.shape], [head.dtype])
    message = np.zeros(start + room, np.uint8)
    message[: head.nbytes].view(np.int64)[:] = head
    if num_bytes <= room:
        for part, array in zip(fusion.from_bytes(message[start:], shapes, dtypes), arrays, strict=True):
            part[...] = array
    everyone = gather_bytes(message, [message.size] * size).reshape(size, -1)
    heads: list[list[int]] = np.ascontiguousarray(everyone[:, : head.nbytes]).view(np.int64).tolist()
    for other, each in enumerate(heads):
        differ = [number for number in range(count, 2 * count) if each[number] != heads[0][number]]
        if differ:
            place = differ[0] - count
            first, theirs = heads[0][2 * count + place], each[2 * count + place]
            found = f"{theirs}" if theirs != first else "as many of another dtype or other dimensions"
            raise EngineError(
                f"Ranks differ in the tensors to gather. Received: {first} bytes a row of tensor {place} on "
                f"rank 0 and {found} on rank {other}; on this rank {rank} the shape "
                f"{arrays[place].shape} of {arrays[place].dtype}. Expected: equal dtypes, and dimensions but the "
                "first. Fix: look for a shape that depends on the rank's own data."
            )
    lengths = [[each[place] for each in heads] for place in range(count)]
    if any(each[-1] > room for each in heads):
        return lengths, None
    by_rank = [
        fusion.from_bytes(part[start:], [(n, *shape[1:]) for n, shape in zip(each, shapes, strict=False)], dtypes)
        for part, each in zip(everyone, heads, strict=True)
    ]
    return lengths, [np.concatenate(parts) for parts in zip(*by_rank, strict=True)]
