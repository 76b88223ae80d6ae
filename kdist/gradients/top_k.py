"""The largest numbers of the gradients alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.gradients.compression import is_plain
from kdist.gradients.error_feedback import ErrorFeedback, Sums, is_finite

_SMALL = 1024  # numbers, below which a gradient is sent whole


class TopK(ErrorFeedback):
    """Sends the numbers of largest size of each gradient and their places, with error feedback.

    Each rank chooses from its own gradient and what it has kept of earlier ones, and keeps what it does not send. All
    ranks get the sum of what the ranks have sent: zeros where none has sent anything.

    Gradients of fewer than 1024 numbers, and of unknown shapes, are sent exactly.

    Args:
        ratio: float, the part of a gradient's numbers that is sent.

    References:
        - Lin et al., 2018, Deep Gradient Compression, https://arxiv.org/abs/1712.01887
        - Stich, Cordonnier and Jaggi, 2018, Sparsified SGD with Memory, https://arxiv.org/abs/1809.07599
    """

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self._ratio = ratio
        self.loss = f"the largest {100 * ratio:g} % of each"

    def _sum_approximately(
        self, engine: Engine, tensors: list[tf.Tensor], others: list[Any], variables: list[Any]
    ) -> Sums:
        """Gathers all ranks' largest numbers in one message, and sums what is not compressed in another."""
        exact = engine.allreduce(others)
        if not tensors:
            return Sums([], [], exact, [])
        places = [tf.math.top_k(tf.abs(each), self._count(each.shape), sorted=False).indices for each in tensors]
        # What is not finite might not be chosen: then nothing that is sent is, so that all ranks know.
        numbers = [
            tf.where(is_finite(each), tf.gather(each, where), tf.constant(math.nan, each.dtype))
            for each, where in zip(tensors, places, strict=True)
        ]
        gathered = engine.allgather([*numbers, *places])
        totals = [
            _scattered(each.shape, theirs, where, engine.size)
            for each, theirs, where in zip(tensors, gathered[: len(tensors)], gathered[len(tensors) :], strict=True)
        ]
        sent = [
            _scattered(each.shape, own, where, 1) for each, own, where in zip(tensors, numbers, places, strict=True)
        ]
        return Sums(totals, sent, exact, [])

    def _shape(self, gradient: tf.Tensor | tf.IndexedSlices) -> list[int] | None:
        """Returns that of a row of numbers."""
        if not is_plain(gradient) or gradient.shape.num_elements() < _SMALL:
            return None
        return [gradient.shape.num_elements()]

    def _compressed_bytes(self, shape: list[int], bytes_of_number: int) -> int:
        return self._count(shape) * (bytes_of_number + tf.int32.size)

    def _count(self, shape: Sequence[int]) -> int:
        return math.ceil(self._ratio * math.prod(shape))


def _scattered(shape: tf.TensorShape, numbers: tf.Tensor, places: tf.Tensor, num_ranks: int) -> tf.Tensor:
    """Returns the sum of the numbers that so many ranks have sent, at their places.

    Rank by rank, for of one rank no place comes twice: so the order of additions is the same everywhere.
    """
    total = tf.zeros(shape, numbers.dtype)
    for theirs, where in zip(tf.split(numbers, num_ranks), tf.split(places, num_ranks), strict=True):
        total = tf.tensor_scatter_nd_add(total, where[:, tf.newaxis], theirs)
    return total
