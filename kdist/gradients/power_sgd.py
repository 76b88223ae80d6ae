"""PowerSGD: gradients of matrices as products of two narrow ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from kdist.engines import flat
from kdist.engines.engine import Engine
from kdist.gradients.compression import is_plain
from kdist.gradients.error_feedback import ErrorFeedback, Sums
from kdist.gradients.kept_state import KeptState


class PowerSGD(ErrorFeedback):
    """Sends the best approximation of low rank that one step of power iteration finds, with error feedback.

    With M a rank's gradient and what it has kept of earlier ones, an n x m matrix, and Q the m x r matrix of the step
    before: P = M Q is summed over the ranks and made orthonormal; Q = M' P is summed; the result is P Q'. Each rank
    keeps what of its M lies outside of P, and adds it to its next gradient: so nothing is lost for good. What all ranks
    get, and what they keep together, follows from the sum of their gradients alone, however many they are.

    Gradients that have fewer than two dimensions, or are not at least twice as large as both factors, are sent exactly.

    Args:
        rank: int, r, the number of columns of both factors.

    References:
        - Vogels, Karimireddy and Jaggi, 2019, PowerSGD, https://arxiv.org/abs/1905.13727
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.loss = f"matrices of rank {rank}"
        # Equal on all ranks.
        self._right = KeptState(lambda shape, dtype: tf.random.stateless_normal(shape, seed=[0, 0], dtype=dtype))

    def _sum_approximately(
        self, engine: Engine, tensors: list[tf.Tensor], others: list[Any], variables: list[Any]
    ) -> Sums:
        """Sums left factors, and what is not compressed, in one message, and right factors in another."""
        right = [
            self._right.of(variable, [each.shape[1], self._rank], each.dtype)
            for variable, each in zip(variables, tensors, strict=True)
        ]
        products = [tf.matmul(each, factor) for each, factor in zip(tensors, right, strict=True)]
        received = engine.allreduce([*products, *others])
        left = [tf.linalg.qr(each).q for each in received[: len(tensors)]]  # of zeros, too, it is orthonormal
        mine = [tf.matmul(each, factor, transpose_a=True) for each, factor in zip(tensors, left, strict=True)]
        summed = engine.allreduce(mine) if mine else []
        totals, sent = (
            [tf.matmul(one, other, transpose_b=True) for one, other in zip(left, factors, strict=True)]
            for factors in (summed, mine)
        )
        return Sums(totals, sent, received[len(tensors) :], list(zip(right, summed, strict=True)))

    def _shape(self, gradient: tf.Tensor | tf.IndexedSlices) -> list[int] | None:
        """Returns that of a matrix whose columns are the layer's outputs."""
        if not is_plain(gradient) or gradient.shape.rank < 2:
            return None
        *rows, columns = gradient.shape
        shape = [math.prod(rows), int(columns)]
        return shape if 2 * self._rank * sum(shape) <= math.prod(shape) else None

    def _compressed_bytes(self, shape: list[int], bytes_of_number: int) -> int:
        return sum(shape) * self._rank * bytes_of_number

    def take(self, engine: Engine) -> dict[str, dict[int, Any]]:
        """Returns what was left out so far, and the factors that the next step begins with."""
        return {
            **super().take(engine),
            "right": {key: flat.to_array(tf.convert_to_tensor(each)) for key, each in self._right.values.items()},
        }

    def give(self, engine: Engine, taken: Mapping[str, Mapping[int, Any]]) -> None:
        """Gives rank 0 what was left out so far, and all ranks the factors that the next step begins with."""
        super().give(engine, taken)
        self._right.give(taken.get("right", {}))
