"""Compression that keeps what it leaves out of a gradient, and adds it to the next one: error feedback."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.gradients.compression import Compression, Gradients, full_bytes
from kdist.gradients.kept_state import KeptState


class ErrorFeedback(Compression):
    """Sums approximations of gradients; each rank keeps what its own lacks, so that nothing is lost for good.

    A step whose sum is not finite, on whichever rank, is none: nothing of it is kept.

    References:
        - Karimireddy et al., 2019, Error Feedback Fixes SignSGD, https://arxiv.org/abs/1901.09847
    """

    keeps_residuals = True

    def __init__(self) -> None:
        self._residuals = KeptState(lambda shape, dtype, _: tf.zeros(shape, dtype))

    @abc.abstractmethod
    def _shape(self, gradient: tf.Tensor | tf.IndexedSlices) -> list[int] | None:
        """Returns the shape in which a gradient is compressed; `None` if it is sent exactly."""

    @abc.abstractmethod
    def _compressed_bytes(self, shape: list[int], bytes_of_number: int) -> int:
        """Returns the bytes that a rank sends of a gradient of that shape."""

    @abc.abstractmethod
    def _sum_approximately(
        self, engine: Engine, tensors: list[tf.Tensor], others: list[Any], variables: list[Any]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[Any]]:
        """Sums tensors about, and others exactly.

        Collective: every rank must call this, in the same order.

        Args:
            engine: `Engine`.
            tensors: list of tensors of at least 32 bits.
            others: list of tensors and `tf.IndexedSlices`.
            variables: list of variables, one for each of `tensors`.

        Returns:
            A tuple of lists: the sums of `tensors`, not finite where those of a rank are not; what this rank has added
            to each; the sums of `others`.
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
        totals, sent, others = self._sum_approximately(
            engine, tensors, [*(gradients[place] for place in rest), *exact], of
        )
        for own, part, total, before in zip(tensors, sent, totals, kept, strict=True):
            before.assign(tf.where(is_finite(total), own - part, before))
        sums: list[Any] = list(gradients)
        for place, total in zip(places, totals, strict=True):
            sums[place] = tf.cast(tf.reshape(total, gradients[place].shape), gradients[place].dtype)
        for place, total in zip(rest, others, strict=False):
            sums[place] = total
        return sums, others[len(rest) :]

    def num_bytes(self, gradient: tf.Tensor | tf.IndexedSlices) -> int:
        """Returns the bytes of what stands for a gradient, or of the gradient; see `Compression.num_bytes`."""
        shape = self._shape(gradient)
        if shape is None:
            return full_bytes(gradient)
        return self._compressed_bytes(shape, max(gradient.dtype.size, tf.float32.size))

    def take(self, engine: Engine) -> dict[str, Any]:
        """Leaves to rank 0 what all ranks have kept: their sum is what counts; see `Compression.take`."""
        kept = self._residuals.values
        totals = engine.allreduce([tf.convert_to_tensor(each) for each in kept]) if kept else []
        for each, total in zip(kept, totals, strict=True):
            each.assign(total if engine.rank == 0 else tf.zeros_like(total))
        return numbered("residual", totals)

    def give(self, engine: Engine, taken: Mapping[str, Any]) -> None:
        """Gives rank 0 what all ranks have kept; see `Compression.give`."""
        found = in_order("residual", taken)
        self._residuals.give(found if engine.rank == 0 else [np.zeros_like(each) for each in found])


def numbered(name: str, tensors: Iterable[Any]) -> dict[str, Any]:
    """Returns tensors as arrays, by a name with a number."""
    return {f"{name}/{number}": np.array(each) for number, each in enumerate(tensors)}


def in_order(name: str, arrays: Mapping[str, Any]) -> list[Any]:
    """Undoes `numbered`."""
    found = [each for each in arrays if each.startswith(f"{name}/")]
    return [arrays[f"{name}/{number}"] for number in range(len(found))]


def is_finite(tensor: tf.Tensor) -> tf.Tensor:
    """Returns whether all numbers of a tensor are finite, a `bool` scalar."""
    return tf.math.is_finite(tf.reduce_sum(tf.abs(tensor)))


def _summable(gradient: tf.Tensor) -> tf.Tensor:
    return tf.cast(gradient, tf.float32) if gradient.dtype.size < tf.float32.size else gradient
