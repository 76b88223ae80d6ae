"""Rows that travel from all ranks to some, block by block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.engines.tensors.checksum import checksum_of_array
from kdist.state.part import BLOCK, DeferredArray


def sent_to(receivers: Sequence[int], rows: Any, engine: Engine) -> Any:
    """Returns the rows of all ranks, in the order of the ranks, on those that receive them; an array.

    Collective: every rank must call this, in the same order.

    Args:
        receivers: sequence of ints, the ranks that get the rows. The others get none.
        rows: tensor, this rank's rows.
        engine: `Engine`.
    """
    number = int(rows.shape[0])
    counts = [number * (rank in receivers) for rank in range(engine.size)]
    sent = tf.concat([rows[:0], *[rows] * len(receivers)], axis=0)
    (received,), _ = engine.alltoallv([sent], tf.constant(counts, tf.int64))
    return received.numpy()


def row_blocks(array: Any) -> Iterator[tuple[int, Any]]:
    """Yields blocks of an array's rows, with the index of the first.

    Collective, if the array is deferred: every rank must iterate over this to the end, in the same order.

    Args:
        array: array, tensor, open HDF5 dataset, which is not read whole, or `DeferredArray`.
    """
    if isinstance(array, DeferredArray):
        start = 0
        for block in array.blocks():
            yield start, block
            start += len(block)
        return
    step = max(1, BLOCK // max(1, math.prod(array.shape[1:]) * tf.as_dtype(array.dtype).size))
    for start in range(0, array.shape[0], step):
        yield start, array[start : start + step]


def checksum(array: Any, dtype: Any, before: int = 0) -> int:
    """Returns the CRC-32 of an array's bytes in a dtype, after those of another checksum.

    Args:
        array: array, eager tensor, or open HDF5 dataset, which is not read whole.
        dtype: `tf.DType`.
        before: int.
    """
    blocks = [array] if not array.shape else (block for _, block in row_blocks(array))
    for block in blocks:
        before = checksum_of_array(np.ascontiguousarray(block, dtype.as_numpy_dtype), before)
    return before


def filled(shape: Sequence[int], dtype: Any, blocks: Iterable[Any]) -> Any:
    """Returns a tensor of some rows that come block by block; no other copy of them is made.

    TensorFlow copies a variable at each read once rows of it were read or updated: new rows are not set in place.

    Args:
        shape: sequence of ints, that of all rows.
        dtype: `tf.DType`.
        blocks: iterable of arrays.
    """
    rows, start = tf.raw_ops.Empty(shape=list(shape), dtype=dtype), 0
    for block in blocks:
        values = tf.cast(block, dtype)
        stop = start + values.shape[0]
        rows = tf.raw_ops.InplaceUpdate(x=rows, i=tf.range(start, stop), v=values)
        start = stop
    return rows
