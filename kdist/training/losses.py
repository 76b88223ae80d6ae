"""Each loss term counts by its own global denominator.

A rank's loss enters the global one with the rank's share of the rows as its weight. That is exact for a term that is a
mean over the batch's rows. Every other term is rescaled here, before the backward pass, so that the weighted sum over
the ranks is what one process would have computed: sum over ranks of weight times term.
"""

from __future__ import annotations

from typing import Any, Protocol

import keras
import tensorflow as tf

from kdist.training._keras_internals import get_keras_mask, noted_masks, unreduced


class Shares(Protocol):
    """What a loss asks of the training step.

    Attributes:
        weight: `float64` scalar, this rank's share of the global batch.
        active: `bool` scalar, whether this rank has rows that count.
    """

    weight: tf.Tensor
    active: tf.Tensor

    def sum_over_ranks(self, value: tf.Tensor) -> tf.Tensor:
        """Sums the active ranks' values."""

    def per_share(self, value: tf.Tensor) -> tf.Tensor:
        """Divides by this rank's share."""


class GlobalLoss:
    """A compiled loss whose weighted sum over the ranks is the loss of the global batch.

    Args:
        loss: the compiled loss.
        shares: the step's weights.
    """

    def __init__(self, loss: Any, shares: Shares) -> None:
        self._loss = loss
        self._shares = shares

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        """Returns this rank's term, scaled to its share."""
        loss = self._loss
        if not isinstance(loss, keras.losses.Loss) or type(loss).__call__ is not keras.losses.Loss.__call__:
            return loss(y_true, y_pred, sample_weight)  # the user's own reduction counts by rows
        if loss.reduction in (None, "none", "sum"):
            return self._shares.per_share(loss(y_true, y_pred, sample_weight))
        if self._is_mean_over_rows(y_pred, sample_weight):
            with noted_masks(loss) as masks:
                value = loss(y_true, y_pred, sample_weight)
            if all(mask is None for mask in masks):
                return value
        total, denominator = unreduced(loss, y_true, y_pred, sample_weight)
        return self._shares.per_share(tf.math.divide_no_nan(total, self._shares.sum_over_ranks(denominator)))

    def _is_mean_over_rows(self, y_pred: Any, sample_weight: Any) -> bool:
        leaves = keras.tree.flatten(y_pred)
        return (
            not (self._loss.reduction == "mean_with_sample_weight" and sample_weight is not None)
            and all(get_keras_mask(leaf) is None for leaf in leaves)
            and all(leaf.shape.rank is not None and leaf.shape[1:].is_fully_defined() for leaf in leaves)
        )
