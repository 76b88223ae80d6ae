"""The interface of gradient compressions."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kdist.engines.engine import Engine

Gradients = Sequence[tf.Tensor | tf.IndexedSlices]


class CompressedSums(NamedTuple):
    """The result of one message of gradients.

    Attributes:
        gradients: list, the sums of the gradients.
        exact: list of tensors, the sums of the others.
        changes: list of pairs of a variable and its value for the next step, if the sums of all messages are finite:
            a step with another one is skipped.
    """

    gradients: list[Any]
    exact: list[Any]
    changes: list[tuple[tf.Variable, tf.Tensor]]


class Compression(abc.ABC):
    """Sums gradients over the ranks in fewer bytes; all ranks get the same sums.

    Attributes:
        description: str, what is sent, for the log.
        keeps_residuals: bool, whether the compression error is added to the next gradient (error feedback).
    """

    description: str
    keeps_residuals = False

    @abc.abstractmethod
    def sum(self, engine: Engine, gradients: Gradients, exact: Gradients, variables: Sequence[Any]) -> CompressedSums:
        """Sums gradients approximately, and other tensors exactly.

        Collective: every rank must call this, in the same order.

        Args:
            engine: `Engine`.
            gradients: sequence of floating tensors and `tf.IndexedSlices`. Those that cannot be compressed, or are too
                small, are summed exactly.
            exact: sequence of tensors.
            variables: sequence of variables, one for each gradient, with which slots are stored.

        Returns:
            `CompressedSums`.
        """

    @abc.abstractmethod
    def num_bytes(self, gradient: tf.Tensor | tf.IndexedSlices) -> int:
        """Returns the number of bytes that a rank sends of a gradient; 0 if its shape is not known."""

    def state_dict(self, engine: Engine) -> dict[str, dict[int, Any]]:
        """Returns the slots of all ranks: a dict by kind of dicts of arrays by variable id.

        Collective: every rank must call this, in the same order.
        """
        return {}

    def load_state_dict(self, engine: Engine, state: Mapping[str, Mapping[int, Any]]) -> None:  # noqa: B027
        """Loads this rank's part of what `state_dict` has returned; other slots are reset."""


def full_bytes(gradient: tf.Tensor | tf.IndexedSlices) -> int:
    """Returns the number of bytes of a gradient; 0 if its shape is not known."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return (values.shape.num_elements() or 0) * values.dtype.size


def planned_bytes(gradient: tf.Tensor | tf.IndexedSlices) -> int:
    """Returns the bytes of a gradient by which messages are planned, the same on all ranks: 0 for slices.

    The number of slices is that of a rank's rows, which an eager step knows and a rank cannot know of the others.
    """
    return 0 if isinstance(gradient, tf.IndexedSlices) else full_bytes(gradient)


def is_plain(gradient: tf.Tensor | tf.IndexedSlices) -> bool:
    """Returns whether a gradient is dense, real, and of a static shape."""
    is_dense = not isinstance(gradient, tf.IndexedSlices)
    return is_dense and gradient.dtype.is_floating and gradient.shape.is_fully_defined()


def is_finite(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """Returns whether all numbers of a gradient are finite, a `bool` scalar."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.math.is_finite(tf.reduce_sum(tf.abs(summable(values))))


def summable(gradient: tf.Tensor) -> tf.Tensor:
    """Returns a gradient in at least 32 bits."""
    return tf.cast(gradient, tf.float32) if gradient.dtype.size < tf.float32.size else gradient
