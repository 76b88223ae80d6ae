"""A number that a step computes by hand from sums and means over rows, or from rows: computed from all ranks'."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kdist.state.graphs.gradients import gradients_of
from kdist.state.graphs.inlined import Inlined
from kdist.step.losses.global_recomputation import GlobalRecomputation


class GlobalValue:
    """The value of the global batch, and what a rank differentiates for it.

    The number is computed again from what all ranks have; see `GlobalRecomputation`. Its gradients by what the rank
    has computed for it are those of the number that all ranks have.

    Args:
        value: tensor, the number, as `of_all_ranks` knows it.
        of_all_ranks: `GlobalRecomputation` of what the number is computed of.
        inlined: `Inlined`, by which the number was made of the step's.
    """

    def __init__(self, value: tf.Tensor, of_all_ranks: GlobalRecomputation, inlined: Inlined) -> None:
        self._value = of_all_ranks(value)
        taken = [(tensor, own) for tensor, own in of_all_ranks.taken if tensor.dtype.is_floating]
        identities = [own for _, own in taken]
        gradients = gradients_of(self._value, identities)
        found = [(tensor, each) for (tensor, _), each in zip(taken, gradients, strict=True) if each is not None]
        self._targets = inlined.recorded([(tensor, tf.convert_to_tensor(each)) for tensor, each in found])

    def as_mean(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the number of all ranks, of which gradients are those by what the rank has computed.

        Of a value with elements it is their sum; each of the result's is the same part of it.
        """
        tensors, gradients = zip(*self._targets, strict=True) if self._targets else ((), ())

        def of_all_ranks(*_: tf.Tensor) -> tuple[tf.Tensor, Any]:
            return tf.identity(self._value), lambda upstream: [upstream * tf.cast(g, upstream.dtype) for g in gradients]

        number = tf.custom_gradient(of_all_ranks)(*tensors) if tensors else self._value
        if value.shape.rank == number.shape.rank:
            return number
        return tf.fill(tf.shape(value), tf.math.divide_no_nan(number, tf.cast(tf.size(value), number.dtype)))

    def targets(self, value: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Returns what is to be differentiated in the place of the number, with the gradients by it."""
        del value
        return self._targets
