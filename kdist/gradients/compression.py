"""The interface of what makes gradients smaller on their way between ranks."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from kdist.engines.engine import Engine

Gradients = Sequence[tf.Tensor | tf.IndexedSlices]


class Compression(abc.ABC):
    """Sums gradients over the ranks in fewer bytes than they have; all ranks get the same sums.

    Attributes:
        loss: str, what is lost, for the log.
        keeps_residuals: bool, whether what is left out of a sum is kept, and added to the next gradient.
    """

    loss: str
    keeps_residuals = False

    @abc.abstractmethod
    def sum(
        self, engine: Engine, gradients: Gradients, exact: Gradients, variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Sums gradients approximately, and other tensors exactly.

        Collective: every rank must call this, in the same order.

        Args:
            engine: `Engine`.
            gradients: sequence of floating tensors and `tf.IndexedSlices`. Those that cannot be compressed, or would
                gain nothing, are summed exactly.
            exact: sequence of tensors.
            variables: sequence of variables, one for each gradient: what is kept from step to step is kept for them.

        Returns:
            A pair of lists: the sums of `gradients` and of `exact`.
        """

    @abc.abstractmethod
    def num_bytes(self, gradient: tf.Tensor | tf.IndexedSlices) -> int:
        """Returns the bytes that a rank sends of a gradient, where they are known before the graph runs."""

    def take(self, engine: Engine) -> dict[str, dict[int, Any]]:
        """Returns what is kept from step to step, of all ranks together; each goes on with its part of it.

        Collective: every rank must call this, in the same order.

        Returns:
            A dict of kinds, each a dict of arrays by the ids of the model's variables.
        """
        return {}

    def give(  # noqa: B027  most keep nothing
        self, engine: Engine, taken: Mapping[str, Mapping[int, Any]]
    ) -> None:
        """Gives this rank its part of what `take` has returned; what is not there begins anew.

        Args:
            engine: `Engine`.
            taken: mapping, as `take` returns it.
        """


def full_bytes(gradient: tf.Tensor | tf.IndexedSlices) -> int:
    """Returns the bytes of a gradient, where they are known before the graph runs."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return (values.shape.num_elements() or 0) * values.dtype.size


def is_plain(gradient: tf.Tensor | tf.IndexedSlices) -> bool:
    """Returns whether a gradient is dense, of real numbers, and of a shape that is known before the graph runs."""
    is_dense = not isinstance(gradient, tf.IndexedSlices)
    return is_dense and gradient.dtype.is_floating and gradient.shape.is_fully_defined()
