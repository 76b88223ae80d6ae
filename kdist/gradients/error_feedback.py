"""Error feedback: the error of a gradient's compression is added to the next gradient."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.engines.tensors import flat
from kdist.gradients.compression import CompressedSums, Compression, Gradients, full_bytes, summable
from kdist.state.slots import Slots


class ApproximateSums(NamedTuple):
    """The result of one message.

    Attributes:
        totals: list of tensors, the sums of compressed tensors, not finite where a rank's tensor is not.
        sent: list of tensors, this rank's term in each of them.
        exact: list, the sums of what was not compressed.
        updates: list of pairs of a variable and its value for the next step.
    """

    totals: list[tf.Tensor]
    sent: list[tf.Tensor]
    exact: list[Any]
    updates: list[tuple[tf.Variable, tf.Tensor]]


class ErrorFeedback(Compression):
    """Sums compressed gradients; each rank keeps its compression error as a residual.

    A sum that is not finite changes no residual, because such a step is skipped.

    References:
        - Karimireddy et al., 2019, Error Feedback Fixes SignSGD, https://arxiv.org/abs/1901.09847
    """

    keeps_residuals = True

    def __init__(self) -> None:
        self._residuals = Slots(tf.zeros)

    @abc.abstractmethod
    def _shape(self, gradient: tf.Tensor | tf.IndexedSlices) -> list[int] | None:
        """Returns the shape in which a gradient is compressed; `None` if it is sent exactly."""

    @abc.abstractmethod
    def _compressed_bytes(self, shape: list[int], bytes_of_number: int) -> int:
        """Returns the bytes that a rank sends of a gradient of that shape."""

    @abc.abstractmethod
    def _sum_approximately(
        self, engine: Engine, tensors: list[tf.Tensor], others: list[Any], variables: list[Any]
    ) -> ApproximateSums:
        """Sums tensors of at least 32 bits approximately, and others exactly.

        Collective: every rank must call this, in the same order.
        """

    def sum(self, engine: Engine, gradients: Gradients, exact: Gradients, variables: Sequence[Any]) -> CompressedSums:
        """Sums gradients and residuals; see `Compression.sum`."""
        places = [place for place, each in enumerate(gradients) if self._shape(each) is not None]
        rest = [place for place in range(len(gradients)) if place not in places]
        compressed = [variables[place] for place in places]
        tensors = [tf.reshape(summable(gradients[place]), self._shape(gradients[place])) for place in places]
        residuals = [
            self._residuals.get(v, each.shape, each.dtype) for v, each in zip(compressed, tensors, strict=True)
        ]
        tensors = [each + residual for each, residual in zip(tensors, residuals, strict=True)]
        found = self._sum_approximately(engine, tensors, [*(gradients[place] for place in rest), *exact], compressed)
        errors = [(state, each - sent) for state, each, sent in zip(residuals, tensors, found.sent, strict=True)]
        sums: list[Any] = list(gradients)
        for place, total in zip(places, found.totals, strict=True):
            sums[place] = tf.cast(tf.reshape(total, gradients[place].shape), gradients[place].dtype)
        for place, total in zip(rest, found.exact, strict=False):
            sums[place] = total
        return CompressedSums(sums, found.exact[len(rest) :], [*errors, *found.updates])

    def num_bytes(self, gradient: tf.Tensor | tf.IndexedSlices) -> int:
        """Returns the bytes of a compressed gradient; see `Compression.num_bytes`."""
        shape = self._shape(gradient)
        if shape is None:
            return full_bytes(gradient)
        return self._compressed_bytes(shape, max(gradient.dtype.size, tf.float32.size))

    def state_dict(self, engine: Engine) -> dict[str, dict[int, Any]]:
        """Moves all residuals to rank 0, as only their sum has an effect; see `Compression.state_dict`."""
        residuals = self._residuals.values
        totals = engine.allreduce([tf.convert_to_tensor(each) for each in residuals.values()]) if residuals else []
        for each, total in zip(residuals.values(), totals, strict=True):
            each.assign(total if engine.rank == 0 else tf.zeros_like(total))
        return {"residual": dict(zip(residuals, map(flat.to_array, totals), strict=True))}

    def load_state_dict(self, engine: Engine, state: Mapping[str, Mapping[int, Any]]) -> None:
        """Loads all residuals on rank 0; see `Compression.load_state_dict`."""
        self._residuals.load(state.get("residual", {}) if engine.rank == 0 else {})
