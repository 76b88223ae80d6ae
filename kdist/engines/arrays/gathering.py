"""Gathers arrays of ranks that have other numbers of rows, by one message of all of them; pure NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from kdist.engines.arrays import fusion
from kdist.engines.arrays.fusion import Array
from kdist.errors import EngineError

GatherBytes = Callable[[Array, list[int]], list[Array]]
"""Takes this rank's bytes and the numbers of bytes of all ranks; returns every rank's bytes, in rank order."""


def allgather(arrays: Sequence[Array], rank: int, size: int, gather_bytes: GatherBytes) -> list[Array]:
    """Concatenates arrays over all ranks along their first axis; see `Engine.allgather`.

    Collective: every rank must call this, in the same order.

    Args:
        arrays: sequence of arrays of any dtypes, whose dimensions but the first are equal on all ranks.
        rank: int, this process's number.
        size: int, the number of ranks.
        gather_bytes: `GatherBytes`.

    Returns:
        A list of arrays, one for each of `arrays`.

    Raises:
        EngineError: if the rows of the ranks have other widths.
    """
    if not arrays:
        return []
    tails = [array.shape[1:] for array in arrays]
    dtypes = [array.dtype for array in arrays]
    # The bytes of a row beside the lengths: rows of different widths would be cut at wrong places unnoticed.
    widths = [math.prod(tail) * dtype.itemsize for tail, dtype in zip(tails, dtypes, strict=True)]
    mine = np.array([[len(array) for array in arrays], widths], np.int64)
    gathered = gather_bytes(mine.reshape(-1).view(np.uint8), [mine.nbytes] * size)
    lengths = np.stack([each.view(np.int64).reshape(mine.shape) for each in gathered])
    if (differing := np.argwhere(lengths[:, 1] != lengths[0, 1])).size:
        other, place = differing[0]
        raise EngineError(
            f"Ranks differ in the tensors to gather. Received: {lengths[0, 1, place]} bytes a row of tensor {place} on "
            f"rank 0 and {lengths[other, 1, place]} on rank {other}; on this rank {rank} the shape "
            f"{arrays[place].shape} of {dtypes[place]}. Expected: equal dtypes, and dimensions but the first. "
            "Fix: look for a shape that depends on the rank's own data."
        )
    shapes = [[(int(n), *tail) for n, tail in zip(counts, tails, strict=True)] for counts in lengths[:, 0]]
    received = gather_bytes(fusion.to_bytes(arrays), [fusion.byte_length(each, dtypes) for each in shapes])
    by_rank = [fusion.from_bytes(part, each, dtypes) for part, each in zip(received, shapes, strict=True)]
    return [np.concatenate(parts) for parts in zip(*by_rank, strict=True)]
