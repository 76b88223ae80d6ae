"""Numbers that a step gives to metrics, and what is counted of them on this rank."""

from __future__ import annotations

import tensorflow as tf

from kdist.data.batch import Rows
from kdist.step.losses.custom_losses import CustomLosses
from kdist.strategies.global_batch import GlobalBatch
from kdist.strategies.open_step import OpenStep


class MetricNumbers:
    """See `NumbersOfStep`.

    Args:
        step: the open step.
        rows: `int64` scalar, the number of this rank's rows.
        losses: `CustomLosses` of the step.
        batch: `GlobalBatch` of the step.
    """

    def __init__(self, step: OpenStep, rows: tf.Tensor, losses: CustomLosses, batch: GlobalBatch) -> None:
        self._step, self._rows, self._batch = step, rows, batch
        self.as_mean, self.as_sum, self.as_weighted = losses.as_mean, losses.as_sum, losses.as_weighted
        self.equally_wide = batch.equally_wide

    @property
    def share(self) -> tf.Tensor:
        """The rank's share of the global batch."""
        return self._step.share

    @property
    def fixed_rows(self) -> tf.Tensor | None:
        """The number of the rank's rows, if the step takes no other."""
        return None if Rows(self._step.data).size is None else self._rows

    @property
    def is_of_all(self) -> bool:
        """Whether a function of the rows of all ranks runs."""
        return self._batch.is_in_call

    def weight_of_loss(self, given: tf.Tensor) -> tf.Tensor:
        """Returns the weight of this rank's loss in its mean, from the one that the step has given.

        Keras gives the length of the first input. That is this rank's part of the sum over the ranks if it is a number
        of rows; else the length counts once.
        """
        leaves = tf.nest.flatten(self._step.data)
        number, first = next(((n, leaf) for n, leaf in enumerate(leaves) if tf.is_tensor(leaf)), (0, None))
        if first is None or given.shape.rank != 0 or isinstance(first, tf.SparseTensor) or first.shape.rank == 0:
            return given
        weight = tf.cast(given, self.share.dtype)
        is_length = weight == tf.cast(tf.shape(first)[0], weight.dtype)
        if Rows(self._step.data).has_rows(number):  # or it is not known
            is_length &= weight != tf.cast(tf.maximum(self._rows, 1), weight.dtype)
        return tf.where(is_length, weight * self.share, weight)
