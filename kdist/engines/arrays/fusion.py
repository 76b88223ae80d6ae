"""Packs arrays into few contiguous buffers, so that many small messages become one; pure NumPy."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Signature = tuple[tuple[np.dtype, int], ...]

# An array from this size on has a buffer of its own: another message then costs less than another copy.
LARGE_BYTES = 1 << 18

# A large buffer is all-reduced several times faster in pieces that stay in the processor's cache.
PIECE_BYTES = 1 << 21

# TensorFlow uses the memory of an array with this alignment without a copy.
ALIGNMENT = 64


class BufferLayout(NamedTuple):
    """Which arrays one buffer holds, and where.

    Attributes:
        dtype: NumPy dtype of the buffer.
        indices: tuple of ints, which arrays it holds, in the order of the list.
        bounds: tuple of ints, the offset of each array in the buffer, in elements, and the buffer's size.
    """

    dtype: np.dtype
    indices: tuple[int, ...]
    bounds: tuple[int, ...]


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which arrays of `dtype` are summed: `float32` for `float16` and `bfloat16`."""
    # By name: bfloat16 is no dtype of NumPy's own.
    return np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype


def empty(size: int, dtype: npt.DTypeLike) -> Array:
    """Returns an uninitialised 1-D array whose memory TensorFlow can use without a copy."""
    num_bytes = size * np.dtype(dtype).itemsize
    block = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + num_bytes].view(dtype)


def pack(arrays: Sequence[Array]) -> list[Array]:
    """Copies arrays into new buffers, ready to be summed.

    Small arrays that are summed in the same dtype share a buffer; a large array has its own. The number, order and
    sizes of the buffers depend only on the arrays' shapes and dtypes.

    Args:
        arrays: sequence of arrays of any shape and of any numeric dtype.

    Returns:
        A list of 1-D arrays; none of them shares memory with `arrays`.
    """
    buffers = []
    for layout in layouts(signature(arrays)):
        buffer = empty(layout.bounds[-1], layout.dtype)
        np.concatenate([arrays[index].ravel() for index in layout.indices], out=buffer, casting="unsafe")
        buffers.append(buffer)
    return buffers


@np.errstate(over="ignore", invalid="ignore")  # as in `SharedMemory.sum`
def unpack(buffers: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    """Undoes `pack`.

    Args:
        buffers: sequence of 1-D arrays, as `pack(like)` returned them.
        like: sequence of arrays that have the wanted shapes and dtypes.

    Returns:
        A list of arrays, views of the buffers where the dtype allows it.
    """
    arrays: list[Array] = list(like)
    for layout, buffer in zip(layouts(signature(like)), buffers, strict=True):
        for index, start, stop in zip(layout.indices, layout.bounds, layout.bounds[1:], strict=False):
            arrays[index] = buffer[start:stop].reshape(like[index].shape).astype(like[index].dtype, copy=False)
    return arrays


def part_bounds(length: int, num_parts: int) -> list[int]:
    """Returns where consecutive parts of near-equal length begin, and where the last one ends.

    Args:
        length: int, what is cut.
        num_parts: int.

    Returns:
        A list of `num_parts + 1` ints; the parts' lengths differ by at most 1.
    """
    return [length * part // num_parts for part in range(num_parts + 1)]


def pieces(buffer: Array, piece_bytes: int = PIECE_BYTES) -> Iterator[Array]:
    """Cuts a 1-D buffer into consecutive views of at most `piece_bytes` bytes; an empty one has none."""
    step = max(1, piece_bytes // buffer.itemsize)
    for start in range(0, buffer.size, step):
        yield buffer[start : start + step]


def to_bytes(arrays: Sequence[Array]) -> Array:
    """Copies arrays of any dtypes, one after the other, into one new buffer of bytes."""
    shapes, dtypes = [array.shape for array in arrays], [array.dtype for array in arrays]
    buffer = empty(byte_length(shapes, dtypes), np.uint8)
    for place, array in zip(from_bytes(buffer, shapes, dtypes), arrays, strict=True):
        place[...] = array
    return buffer


def from_bytes(buffer: Array, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]) -> list[Array]:
    """Undoes `to_bytes`; the arrays are views of the buffer."""
    lengths = _lengths(shapes, dtypes)
    return [
        buffer[start : start + length].view(dtype).reshape(shape)
        for start, length, shape, dtype in zip(_starts(lengths), lengths, shapes, dtypes, strict=False)
    ]


def byte_length(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]) -> int:
    """Returns the size of the buffer that `to_bytes` makes for such arrays."""
    return _starts(_lengths(shapes, dtypes))[-1]


def _lengths(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]) -> list[int]:
    return [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]


def _starts(lengths: Sequence[int]) -> list[int]:
    """Returns the aligned offset of each array, and the size of the buffer."""
    return list(itertools.accumulate((length + -length % ALIGNMENT for length in lengths), initial=0))


def signature(arrays: Sequence[Array]) -> Signature:
    """Returns what `layouts` goes by: each array's dtype and number of elements."""
    return tuple([(array.dtype, array.size) for array in arrays])


@functools.lru_cache(maxsize=128)  # each training step packs the same shapes
def layouts(kinds: Signature) -> tuple[BufferLayout, ...]:
    """Returns the layouts of the buffers: small arrays that are summed in one dtype share one, a large array has one.

    Args:
        kinds: tuple of pairs of a NumPy dtype and a number of elements, one for each array.

    Returns:
        A tuple of `BufferLayout`.
    """
    members: dict[tuple[np.dtype, int | None], list[int]] = {}
    for index, (dtype, size) in enumerate(kinds):
        summed = sum_dtype(dtype)
        is_large = size * summed.itemsize >= LARGE_BYTES
        members.setdefault((summed, index if is_large else None), []).append(index)
    return tuple(
        BufferLayout(dtype, tuple(indices), tuple(itertools.accumulate((kinds[i][1] for i in indices), initial=0)))
        for (dtype, _), indices in members.items()
    )
