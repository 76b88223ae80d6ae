"""Compression that keeps what it leaves out of a gradient, and adds it to the next one: error feedback."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kdist.engines import flat
from kdist.engines.engine import Engine
from kdist.gradients.compression import Compression, Gradients, full_bytes
from kdist.gradients.kept_state import KeptState


class Sums(NamedTuple):
    """What came of one message.

    Attributes:
        totals: list of tensors, the sums of what was compressed, not finite where those of a rank are not.
        sent: list of tensors, what this rank has added to each of them.
        others: list, the sums of what was not compressed.
        kept: list of pairs of a variable and a value, what else is kept for the next step.
    """

    totals: list[tf.Tensor]
    sent: list[tf.Tensor]
    others: list[Any]
    kept: list[tuple[tf.Variable, tf.Tensor]]


class ErrorFeedback(Compression):
    """Sums approximations of gradients; each rank keeps what its own lacks, so that nothing is lost for good.

    Where a sum is not finite, for some rank's gradient is not, nothing of that message is kept: such a step is none.
    (Of the other messages of a step that has several it is.)

    References:
        - Karimireddy et al., 2019, Error Feedback Fixes SignSGD, https://arxiv.org/abs/1901.09847
    """

    keeps_residuals = True

    def __init__(self) -> None:
        self._residuals = KeptState(tf.zeros)

    @abc.abstractmethod
    def _shape(self, gradient: tf.Tensor | tf.IndexedSlices) -> list[int] | None:
        """Returns the shape in which a gradient is compressed; `None` if it is sent exactly."""

    @abc.abstractmethod
    def _compressed_bytes(self, shape: list[int], bytes_of_number: int) -> int:
        """Returns the bytes that a rank sends of a gradient of that shape."""

    @abc.abstractmethod
    def _sum_approximately(
        self, engine: Engine, tensors: list[tf.Tensor], others: list[Any], variables: list[Any]
    ) -> Sums:
        """Sums tensors approximately, and others exactly.

        Collective: every rank must call this, in the same order.

        Args:
            engine: `Engine`.
            tensors: list of tensors of at least 32 bits.
            others: list of tensors and `tf.IndexedSlices`.
            variables: list of variables, one for each of `tensors`.
        """

    def sum(
        self, engine: Engine, gradients: Gradients, exact: Gradients, variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Sums what can be compressed and what this rank has kept of it; see `Compression.sum`."""
        places = [place for place, each in enumerate(gradients) if self._shape(each) is not None]
        rest = [place for place in range(len(gradients)) if place not in places]
        of = [variables[place] for place in places]
        tensors = [tf.reshape(_summable(gradients[place]), self._shape(gradients[place])) for place in places]
        kept = [self._residuals.of(each, own.shape, own.dtype) for each, own in zip(of, tensors, strict=True)]
        tensors = [own + before for own, before in zip(tensors, kept, strict=True)]
        found = self._sum_approximately(engine, tensors, [*(gradients[place] for place in rest), *exact], of)
        left = [(before, own - part) for before, own, part in zip(kept, tensors, found.sent, strict=True)]
        counts = tf.reduce_all([is_finite(each) for each in (*found.totals, *found.others[: len(rest)])])
        for state, value in (*left, *found.kept):
            state.assign(tf.where(counts, value, state))
        sums: list[Any] = list(gradients)
        for place, total in zip(places, found.totals, strict=True):
            sums[place] = tf.cast(tf.reshape(total, gradients[place].shape), gradients[place].dtype)
        for place, total in zip(rest, found.others, strict=False):
            sums[place] = total
        return sums, found.others[len(rest) :]

    def num_bytes(self, gradient: tf.Tensor | tf.IndexedSlices) -> int:
        """Returns the bytes of what stands for a gradient, or of the gradient; see `Compression.num_bytes`."""
        shape = self._shape(gradient)
        if shape is None:
            return full_bytes(gradient)
        return self._compressed_bytes(shape, max(gradient.dtype.size, tf.float32.size))

    def take(self, engine: Engine) -> dict[str, dict[int, Any]]:
        """Leaves to rank 0 what all ranks have kept: their sum is what counts; see `Compression.take`."""
        kept = self._residuals.values
        totals = engine.allreduce([tf.convert_to_tensor(each) for each in kept.values()]) if kept else []
        for each, total in zip(kept.values(), totals, strict=True):
            each.assign(total if engine.rank == 0 else tf.zeros_like(total))
        return {"residual": dict(zip(kept, map(flat.to_array, totals), strict=True))}

    def give(self, engine: Engine, taken: Mapping[str, Mapping[int, Any]]) -> None:
        """Gives rank 0 what all ranks have kept; see `Compression.give`."""
        self._residuals.give(taken.get("residual", {}) if engine.rank == 0 else {})


def is_finite(tensor: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """Returns whether all numbers of a gradient are finite, a `bool` scalar."""
    values = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
    return tf.math.is_finite(tf.reduce_sum(tf.abs(_summable(values))))


def _summable(gradient: tf.Tensor) -> tf.Tensor:
    return tf.cast(gradient, tf.float32) if gradient.dtype.size < tf.float32.size else gradient
