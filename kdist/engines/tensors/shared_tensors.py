"""Sums and gathers tensors of ranks of one host through memory that they share, eagerly and in graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.engines.arrays import fusion
from kdist.engines.arrays.fusion import Array
from kdist.engines.arrays.shared_memory import SharedMemory
from kdist.engines.tensors import flat, slices
from kdist.engines.tensors.ordered_calls import OrderedCalls


class SharedTensors:
    """Sums and gathers tensors in a `SharedMemory`: several times faster than any network.

    Its collectives run in program order.

    Args:
        memory: `SharedMemory`.
        in_turn: `OrderedCalls`, which orders the calls of graphs.
    """

    def __init__(self, memory: SharedMemory, in_turn: OrderedCalls) -> None:
        self._memory, self._in_turn = memory, in_turn

    def sum(self, buffers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums 1-D tensors of numbers over all ranks, in rank order.

        Collective: every rank must call this, in the same order.

        Args:
            buffers: sequence of 1-D tensors whose shapes are known, and equal on all ranks.

        Returns:
            A list of tensors of the same shapes and dtypes.

        Raises:
            EngineError: if the ranks' sizes differ, or a rank has ended; in a graph, TensorFlow's error with its text.
        """

        def exchange(*arrays: Array) -> list[Array]:
            self._memory.sum(*arrays)
            return list(arrays)

        if tf.executing_eagerly():
            copies = [each for buffer in buffers for each in fusion.pack([flat.to_array(buffer)])]
            return [tf.convert_to_tensor(each) for each in exchange(*copies)]
        sums = self._in_turn.call(exchange, buffers, num_owned=len(buffers))
        return [tf.ensure_shape(total, buffer.shape) for total, buffer in zip(sums, buffers, strict=True)]

    def meet(self, word: int, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Waits for all ranks.

        Collective: every rank must call this, in the same order.

        Args:
            word: int, see `SharedMemory.meet`.
            tensors: sequence of tensors, one at least, which must be there before.

        Returns:
            A list of the same tensors, which are there when all ranks have come.
        """

        def meet(arrays: list[Array]) -> list[Array]:
            self._memory.meet(word)
            return arrays

        return self._call(meet, tensors, [tensor.shape for tensor in tensors])

    def reduce_scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors over all ranks, and returns this rank's rows; see `Engine.reduce_scatter`.

        Collective: every rank must call this, in the same order.

        Args:
            tensors: sequence of tensors of known shapes and of numbers, equal on all ranks.

        Returns:
            A list of tensors of the same dtypes.

        Raises:
            EngineError: as `sum`.
        """
        size = self._memory.size
        shapes = [flat.part(tensor, self._memory.rank, size).shape for tensor in tensors]
        return self._call(self._memory.reduce_scatter, tensors, shapes)

    def gather(self, tensors: Sequence[tf.Tensor], lengths: Sequence[Sequence[int]] | None = None) -> list[tf.Tensor]:
        """Concatenates tensors over all ranks along their first axis; see `Engine.allgather`.

        Collective: every rank must call this, in the same order.

        Args:
            tensors: sequence of tensors, whose dimensions but the first are equal on all ranks.
            lengths: the first dimension of each tensor on each rank, if known.

        Returns:
            A list of tensors of the same dtypes, with the rows of all ranks.

        Raises:
            EngineError: as `sum`, and if the rows of the ranks have other widths.
        """
        exchange = functools.partial(self._memory.allgather, lengths=lengths)
        return self._call(exchange, tensors, slices.gathered_shapes(tensors, lengths))

    def _call(
        self, collective: Callable[[list[Array]], list[Array]], tensors: Sequence[tf.Tensor], shapes: Sequence[Any]
    ) -> list[tf.Tensor]:
        def exchange(*arrays: Array) -> list[Array]:
            return collective([np.asarray(array) for array in arrays])

        if tf.executing_eagerly():
            return [tf.convert_to_tensor(each) for each in exchange(*map(flat.to_array, tensors))]
        results = self._in_turn.call(exchange, tensors)
        return [tf.ensure_shape(result, shape) for result, shape in zip(results, shapes, strict=True)]
