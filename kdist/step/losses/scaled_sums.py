"""A number that a step computes by hand as a weighted sum of means and sums over rows."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class ScaledSums:
    """Divides the sums among a number's terms by the rank's share of the rows, so that all counts as a mean.

    Args:
        weight: `float64` scalar, the weight of this rank's loss.
        terms: sequence of pairs: a sum over rows, and its factor in the number.
    """

    def __init__(self, weight: tf.Tensor, terms: Sequence[tuple[tf.Tensor, float]]) -> None:
        self._weight = weight
        self._terms = terms

    def as_mean(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the number, of which the weighted sum over the ranks is that of the global batch."""
        for term, factor in self._terms:
            value = value + tf.cast(self._excess(term, factor) * term, value.dtype)
        return value

    def targets(self, value: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Returns what is to be differentiated in the place of the number, with the gradients by it.

        A term is scaled by being a target itself: what is computed after the forward pass is not on the tape.
        """
        scaled = [(value, tf.ones((), value.dtype))]
        scaled += [(term, self._excess(term, factor)) for term, factor in self._terms]
        return [(each, tf.fill(tf.shape(each), by)) for each, by in scaled]

    def _excess(self, term: tf.Tensor, factor: float) -> tf.Tensor:
        """Returns how often a sum is added to a number, of which it is a term, to be divided by this rank's weight.

        Args:
            term: tensor, the sum.
            factor: float, how often it is in the number.
        """
        weight = self._weight
        times = tf.math.divide_no_nan(tf.ones((), weight.dtype), weight) - 1  # without rows, the sum is taken away
        return tf.constant(factor, term.dtype) * tf.cast(times, term.dtype)
