"""Sums and gathers tensors of ranks of one host through memory that they share, eagerly and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.engines.arrays import fusion, gathering
from kdist.engines.arrays.fusion import Array
from kdist.engines.arrays.shared_memory import SharedMemory
from kdist.engines.tensors import flat, slices
from kdist.engines.tensors.ordered_calls import OrderedCalls

SHARED_BYTES = 1 << 16
"""The size from which a sum in shared memory is faster than a message: it takes Python in the graph."""


class SharedTensors:
    """Sums and gathers tensors in a `SharedMemory`: several times faster than any network.

    Made by `open`. Its collectives run in program order.

    Args:
        memory: `SharedMemory`.
        rank: int, this process's number.
        size: int, the number of ranks.
        in_turn: `OrderedCalls`, which orders the calls of graphs.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int, in_turn: OrderedCalls) -> None:
        self._memory, self._rank, self._size, self._in_turn = memory, rank, size, in_turn

    @classmethod
    def open(
        cls,
        rank: int,
        size: int,
        in_turn: OrderedCalls,
        gather: Callable[[Any], list[Any]],
        timeout: float | None = None,
        names: Sequence[int] | None = None,
    ) -> SharedTensors | None:
        """Maps the memory of all ranks; see `SharedMemory.open`.

        Collective: every rank must call this, in the same order.

        Args:
            rank: int, this process's number.
            size: int, the number of ranks.
            in_turn: `OrderedCalls`.
            gather: function that returns every rank's value, in rank order; as `Engine.gather_objects`.
            timeout: float or `None`, seconds that a rank may wait for another one, later.
            names: sequence of ints, the ranks' numbers in error messages; by default from 0.

        Returns:
            A `SharedTensors`, or `None` on all ranks if one cannot map the memory of another.
        """
        memory = SharedMemory.open(rank, size, gather, timeout, names)
        return None if memory is None else cls(memory, rank, size, in_turn)

    def pays(self, buffers: Sequence[tf.Tensor]) -> bool:
        """Returns whether buffers of known sizes are large enough to be summed here."""
        return sum(flat.size(each) * each.dtype.size for each in buffers) >= SHARED_BYTES

    def sum(self, buffers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums 1-D tensors of numbers over all ranks, in rank order.

        Collective: every rank must call this, in the same order.

        Args:
            buffers: sequence of 1-D tensors whose shapes are known, and equal on all ranks.
        """

        def exchange(*arrays: Array) -> list[Array]:
            self._memory.sum(*arrays)
            return list(arrays)

        if tf.executing_eagerly():
            copies = [each for buffer in buffers for each in fusion.pack([flat.to_array(buffer)])]
            return [tf.convert_to_tensor(each) for each in exchange(*copies)]
        sums = self._in_turn.call(exchange, buffers, num_owned=len(buffers))
        return [tf.ensure_shape(total, buffer.shape) for total, buffer in zip(sums, buffers, strict=True)]

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Concatenates tensors over all ranks along their first axis; see `Engine.allgather`.

        Collective: every rank must call this, in the same order.

        Args:
            tensors: sequence of tensors, whose dimensions but the first are equal on all ranks.
        """

        def exchange(*arrays: Array) -> list[Array]:
            mine = [np.asarray(array) for array in arrays]
            return gathering.allgather(mine, self._rank, self._size, self._memory.gather_bytes)

        if tf.executing_eagerly():
            return [tf.convert_to_tensor(each) for each in exchange(*map(flat.to_array, tensors))]
        gathered = self._in_turn.call(exchange, tensors)
        return [
            tf.ensure_shape(each, slices.any_length(tensor.shape))
            for each, tensor in zip(gathered, tensors, strict=True)
        ]
