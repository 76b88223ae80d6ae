"""The interface of gradient compressions."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from kdist.engines.engine import Engine

Gradients = Sequence[tf.Tensor | tf.IndexedSlices]


class Compression(abc.ABC):
    """Sums gradients over the ranks in fewer bytes; all ranks get the same sums.

    Attributes:
        description: str, what is sent, for the log.
        keeps_residuals: bool, whether the compression error is added to the next gradient (error feedback).
    """

    description: str
    keeps_residuals = False

    @abc.abstractmethod
    def sum(
        self, engine: Engine, gradients: Gradients, exact: Gradients, variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Sums gradients approximately, and other tensors exactly.

        Collective: every rank must call this, in the same order.

        Args:
            engine: `Engine`.
            gradients: sequence of floating tensors and `tf.IndexedSlices`. Those that cannot be compressed, or are too
                small, are summed exactly.
            exact: sequence of tensors.
            variables: sequence of variables, one for each gradient, with which slots are stored.

        Returns:
            A pair of lists: the sums of `gradients` and of `exact`.
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


def is_plain(gradient: tf.Tensor | tf.IndexedSlices) -> bool:
    """Returns whether a gradient is dense, real, and of a static shape."""
    is_dense = not isinstance(gradient, tf.IndexedSlices)
    return is_dense and gradient.dtype.is_floating and gradient.shape.is_fully_defined()
