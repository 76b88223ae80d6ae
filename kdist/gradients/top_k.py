"""Top-k compression: only the largest numbers of the gradients are sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.gradients.compression import is_finite, is_plain
from kdist.gradients.error_feedback import ApproximateSums, ErrorFeedback

_SMALL = 1024  # a gradient of fewer numbers is sent whole


class TopK(ErrorFeedback):
    """Sends the numbers of largest magnitude of each gradient and their indices, with error feedback.

    Each rank chooses from its gradient plus its residual. The result is the sum of the sent numbers, zero elsewhere.

    Gradients of fewer than 1024 numbers, and of unknown shapes, are sent exactly.

    Args:
        ratio: float, the fraction of a gradient's numbers that is sent.

    References:
        - Lin et al., 2018, Deep Gradient Compression, https://arxiv.org/abs/1712.01887
        - Stich, Cordonnier and Jaggi, 2018, Sparsified SGD with Memory, https://arxiv.org/abs/1809.07599
    """

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self._ratio = ratio
        self.description = f"the largest {100 * ratio:g} % of each"

    def _sum_approximately(
        self, engine: Engine, tensors: list[tf.Tensor], others: list[Any], variables: list[Any]
    ) -> ApproximateSums:
        """Gathers all ranks' largest numbers in one message, and sums exact tensors in another."""
        exact = engine.allreduce(others)
        if not tensors:
            return ApproximateSums([], [], exact, [])
        places = [tf.math.top_k(tf.abs(each), self._count(each.shape), sorted=False).indices for each in tensors]
        # A number that is not finite might not be chosen: then NaN is sent, so that all ranks see it.
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
        return ApproximateSums(totals, sent, exact, [])

    def _shape(self, gradient: tf.Tensor | tf.IndexedSlices) -> list[int] | None:
        """Returns the shape of the flat gradient."""
        if not is_plain(gradient) or gradient.shape.num_elements() < _SMALL:
            return None
        return [gradient.shape.num_elements()]

    def _compressed_bytes(self, shape: list[int], bytes_of_number: int) -> int:
        return self._count(shape) * (bytes_of_number + tf.int32.size)

    def _count(self, shape: Sequence[int]) -> int:
        return math.ceil(self._ratio * math.prod(shape))


def _scattered(shape: tf.TensorShape, numbers: tf.Tensor, places: tf.Tensor, num_ranks: int) -> tf.Tensor:
    """Returns the sum of the ranks' numbers at their indices, added rank by rank: in the same order on all ranks."""
    total = tf.zeros(shape, numbers.dtype)
    for theirs, where in zip(tf.split(numbers, num_ranks), tf.split(places, num_ranks), strict=True):
        total = tf.tensor_scatter_nd_add(total, where[:, tf.newaxis], theirs)
    return total
