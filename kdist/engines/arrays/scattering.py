"""Sums arrays over ranks, each rank its rows only, in pieces that stay in the processor's cache; pure NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kdist.engines.arrays import fusion
from kdist.engines.arrays.fusion import Array

EXCHANGE_BYTES = 1 << 20
"""How many bytes a rank sends to all others at a time."""

Exchange = Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]]
"""Sends 1-D arrays, one to each rank, and returns one of each rank, in rank order, that has the length of this rank's
own. Its own array is not sent but returned. What it returns is used before the next call; it may use the memory of its
second argument, arrays of the right lengths and dtype.
"""


def reduce_scatter(arrays: Sequence[Array], rank: int, size: int, exchange: Exchange) -> list[Array]:
    """Returns this rank's rows of the sums, added in rank order; see `Engine.reduce_scatter`.

    Collective: every rank must call this, in the same order.

    Args:
        arrays: sequence of arrays of at least one dimension and of any numeric dtype; shapes and dtypes are equal on
            all ranks.
        rank: int, this process's number.
        size: int, the number of ranks.
        exchange: `Exchange`.

    Returns:
        A list of arrays, one for each of `arrays`.
    """
    bounds = [fusion.part_bounds(len(array), size) for array in arrays]
    sums: list[Array] = list(arrays)
    for layout in fusion.layouts(fusion.signature(arrays)):
        parts = [
            [arrays[index][bounds[index][each] : bounds[index][each + 1]] for index in layout.indices]
            for each in range(size)
        ]
        total = _sum([_joined(of_rank, layout.dtype) for of_rank in parts], layout.dtype, rank, exchange)
        mine = parts[rank]
        for index, part, summed in zip(
            layout.indices, mine, np.split(total, np.cumsum([part.size for part in mine])[:-1]), strict=True
        ):
            sums[index] = summed.reshape(part.shape).astype(part.dtype, copy=False)
    return sums


def _joined(parts: Sequence[Array], dtype: np.dtype) -> Array:
    """Returns arrays as one of one dimension: a single one as it is, in its own dtype."""
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0]).reshape(-1)
    joined = fusion.empty(sum(part.size for part in parts), dtype)
    np.concatenate([part.ravel() for part in parts], out=joined, casting="unsafe")
    return joined


@np.errstate(over="ignore", invalid="ignore")  # as in `SharedMemory.sum`
def _sum(parts: Sequence[Array], dtype: np.dtype, rank: int, exchange: Exchange) -> Array:
    """Returns the sum over the ranks of what they have for this one.

    Args:
        parts: sequence of 1-D arrays, what this rank has for each rank.
        dtype: NumPy dtype of the sum.
        rank: int, this process's number.
        exchange: `Exchange`.
    """
    total = fusion.empty(parts[rank].size, dtype)
    step = max(1, EXCHANGE_BYTES // len(parts) // parts[rank].itemsize)
    memory = [fusion.empty(min(step, total.size), parts[rank].dtype) for _ in parts]
    for start in range(0, max(part.size for part in parts), step):
        out = total[start : start + step]
        sent = [part[start : start + step] for part in parts]
        first, *others = exchange(sent, [each[: out.size] for each in memory])
        if not others:
            np.copyto(out, first)
        for before, term in zip([first, *[out] * len(others)], others, strict=False):
            np.add(before, term, out=out, dtype=dtype)
    return total
