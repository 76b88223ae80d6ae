"""Gathers arrays of ranks that have other numbers of rows, by one message of all of them; pure NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from kdist.engines.arrays import fusion
from kdist.engines.arrays.fusion import Array
from kdist.errors import EngineError

GatherBytes = Callable[[Array, list[int]], Array]
"""Takes this rank's bytes and the numbers of bytes of all ranks; returns all ranks' bytes, in rank order."""

Lengths = Sequence[Sequence[int]]
"""For each array, its number of rows on each rank."""


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
        lengths: `Lengths` or `None`, which costs a message.

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
        lengths = _lengths(arrays, widths, rank, size, gather_bytes)
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


def _lengths(
    arrays: Sequence[Array], widths: Sequence[int], rank: int, size: int, gather_bytes: GatherBytes
) -> list[list[int]]:
    # The bytes of a row beside the lengths: rows of different widths would be cut at wrong places unnoticed.
    mine = np.array([[len(array) for array in arrays], widths], np.int64)
    everyone = gather_bytes(mine.reshape(-1).view(np.uint8), [mine.nbytes] * size)
    lengths = everyone.view(np.int64).reshape(size, *mine.shape)
    if (differing := np.argwhere(lengths[:, 1] != lengths[0, 1])).size:
        other, place = differing[0]
        raise EngineError(
            f"Ranks differ in the tensors to gather. Received: {lengths[0, 1, place]} bytes a row of tensor {place} on "
            f"rank 0 and {lengths[other, 1, place]} on rank {other}; on this rank {rank} the shape "
            f"{arrays[place].shape} of {arrays[place].dtype}. Expected: equal dtypes, and dimensions but the first. "
            "Fix: look for a shape that depends on the rank's own data."
        )
    counts: list[list[int]] = lengths[:, 0].T.tolist()
    return counts
