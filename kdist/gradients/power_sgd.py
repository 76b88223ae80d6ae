"""PowerSGD: gradients of matrices as products of two low-rank factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.engines.tensors import flat
from kdist.gradients.compression import is_plain
from kdist.gradients.error_feedback import ApproximateSums, ErrorFeedback
from kdist.state.slots import Slots


class PowerSGD(ErrorFeedback):
    """Sends the low-rank approximation that one step of power iteration finds, with error feedback.

    Let M (n x m) be a rank's gradient plus its residual, and Q (m x r) the right factor of the step before. P = M Q is
    summed over the ranks and orthonormalized; Q = M' P is summed; the result is P Q'. The new residual is M - P P' M.
    The result and the sum of the residuals depend on the sum of the gradients only, not on the number of ranks.

    Gradients of fewer than two dimensions, or less than twice as large as both factors together, are sent exactly.

    Args:
        rank: int, r, the number of columns of both factors.

    References:
        - Vogels, Karimireddy and Jaggi, 2019, PowerSGD, https://arxiv.org/abs/1905.13727
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.description = f"matrices of rank {rank}"
        self._right = Slots(lambda shape, dtype: tf.random.stateless_normal(shape, seed=[0, 0], dtype=dtype))

    def _sum_approximately(
        self, engine: Engine, tensors: list[tf.Tensor], others: list[Any], variables: list[Any]
    ) -> ApproximateSums:
        """Sums left factors and exact tensors in one message, and right factors in another."""
        right = [
            self._right.get(variable, [each.shape[1], self._rank], each.dtype)
            for variable, each in zip(variables, tensors, strict=True)
        ]
        products = [tf.matmul(each, factor) for each, factor in zip(tensors, right, strict=True)]
        received = engine.allreduce([*products, *others])
        left = [tf.linalg.qr(each).q for each in received[: len(tensors)]]  # orthonormal for zeros too
        local = [tf.matmul(each, factor, transpose_a=True) for each, factor in zip(tensors, left, strict=True)]
        summed = engine.allreduce(local) if local else []
        totals, sent = (
            [tf.matmul(one, other, transpose_b=True) for one, other in zip(left, factors, strict=True)]
            for factors in (summed, local)
        )
        return ApproximateSums(totals, sent, received[len(tensors) :], list(zip(right, summed, strict=True)))

    def _shape(self, gradient: tf.Tensor | tf.IndexedSlices) -> list[int] | None:
        """Returns the shape of the matrix whose columns are the layer's outputs."""
        if not is_plain(gradient) or gradient.shape.rank < 2:
            return None
        *rows, columns = gradient.shape
        shape = [math.prod(rows), int(columns)]
        return shape if 2 * self._rank * sum(shape) <= math.prod(shape) else None

    def _compressed_bytes(self, shape: list[int], bytes_of_number: int) -> int:
        return sum(shape) * self._rank * bytes_of_number

    def state_dict(self, engine: Engine) -> dict[str, dict[int, Any]]:
        """Returns the residuals, and the right factors for the next step."""
        return {
            **super().state_dict(engine),
            "right": {key: flat.to_array(tf.convert_to_tensor(each)) for key, each in self._right.values.items()},
        }

    def load_state_dict(self, engine: Engine, state: Mapping[str, Mapping[int, Any]]) -> None:
        """Loads the residuals on rank 0, and the right factors on all ranks."""
        super().load_state_dict(engine, state)
        self._right.load(state.get("right", {}))
