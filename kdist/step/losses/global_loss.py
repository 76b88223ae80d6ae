"""Losses of the global batch.

The global loss is the sum over the ranks of the rank's loss times its share of the rows. That is exact for a mean over
rows. Another sum or mean over elements is rescaled here, before the backward pass, so that the weighted sum is exact.
Any other loss is computed from the rows of all ranks, on each rank.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.losses import get_keras_mask, is_reduced_per_row, recorded_masks, unreduced
from kdist.strategies.differentiable import sum_over_ranks
from kdist.strategies.global_batch import GlobalBatch
from kdist.strategies.open_step import OpenStep


class GlobalLoss:
    """A compiled loss whose weighted sum over the ranks is the loss of the global batch.

    Args:
        loss: the compiled loss.
        step: the open step.
        batch: `GlobalBatch` of the step.
        has_other_rows: bool, whether the loss may be called on other rows than the step's: by a `train_step` or a
            `compute_loss` of the user's.
    """

    def __init__(self, loss: Any, step: OpenStep, batch: GlobalBatch, *, has_other_rows: bool) -> None:
        self._loss = loss
        self._step = step
        self._batch = batch
        self._has_other_rows = has_other_rows

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        """Returns this rank's term."""
        loss = self._loss
        if not is_reduced_per_row(loss, y_pred):
            return self._batch.call(f"The loss {getattr(loss, 'name', loss)!r}", loss, y_true, y_pred, sample_weight)
        if loss.reduction in (None, "none", "sum"):
            value = loss(y_true, y_pred, sample_weight)
            sums = self._step.per_share(value)
            # Losses of rows are logged as their mean, and differentiated as their sum.
            return sums if loss.reduction == "sum" else sums + tf.stop_gradient(value - sums)
        if self._is_mean_over_rows(y_pred, sample_weight):
            with recorded_masks(loss) as masks:
                value = loss(y_true, y_pred, sample_weight)
            if all(mask is None for mask in masks):
                return value
        total, denominator = unreduced(loss, y_true, y_pred, sample_weight)
        (of_all_ranks,) = sum_over_ranks(self._step.engine, self._step, [denominator])
        return self._step.per_share(tf.math.divide_no_nan(total, of_all_ranks))

    def _is_mean_over_rows(self, y_pred: Any, sample_weight: Any) -> bool:
        leaves = keras.tree.flatten(y_pred)
        return (
            not self._has_other_rows
            and not (self._loss.reduction == "mean_with_sample_weight" and sample_weight is not None)
            and all(get_keras_mask(leaf) is None for leaf in leaves)
            and all(leaf.shape.rank is not None and leaf.shape[1:].is_fully_defined() for leaf in leaves)
        )
