"""`Mean` and `Sum` metrics in a rank's step: what they are given is weighted as in the global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist._tf_internals import is_compiled_by_xla
from kdist.data.batch import Rows
from kdist.keras_hooks.losses import get_keras_mask
from kdist.keras_hooks.metrics import is_among_weighted
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.trainer import computes_custom_loss, is_output_loss, loss_tracker
from kdist.step.losses.custom_losses import CustomLosses
from kdist.strategies.global_batch import GlobalBatch
from kdist.strategies.open_step import OpenStep


class WeightedMetrics:
    """Weights what is given to a model's `Mean` and `Sum` metrics as in the global batch.

    A scalar is the mean of a batch. Weighted by the ranks' shares, N of them equal that of the global batch. What a
    `Sum` is given may also be a sum over rows. A row of time steps is the mean of those that count, over the width of
    the batch, which is that of the widest rank.

    Args:
        model: `keras.Model`.
        step: the open step.
        rows: `int64` scalar, the number of this rank's rows.
        losses: `CustomLosses` of the step.
        batch: `GlobalBatch` of the step.
        joint: bool, whether `joint_metrics` and what is nested in them count the global batch, without a weight.
    """

    def __init__(
        self,
        model: keras.Model,
        step: OpenStep,
        rows: tf.Tensor,
        losses: CustomLosses,
        batch: GlobalBatch,
        *,
        joint: bool,
    ) -> None:
        self._model = model
        self._step = step
        self._rows = rows
        self._losses = losses
        self._batch = batch
        self._joint = joint

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """A context in which metrics are given what is weighted."""
        original, original_of_sum = keras.metrics.Mean.update_state, keras.metrics.Sum.update_state

        def update_state(metric: Any, values: Any, sample_weight: Any = None) -> Any:
            if not self._batch.is_in_call:
                values, sample_weight = self._of_mean(metric, values, sample_weight)
            return original(metric, values, sample_weight=sample_weight)

        def update_sum(metric: Any, values: Any, sample_weight: Any = None) -> Any:
            if not self._batch.is_in_call and sample_weight is None:
                values = self._of_sum(metric, values)
            return original_of_sum(metric, values, sample_weight=sample_weight)

        # The classes, as `MeanMetricWrapper` calls its parent's method.
        with (
            patched(keras.metrics.Mean, "update_state", update_state),
            patched(keras.metrics.Sum, "update_state", update_sum),
        ):
            yield

    def _of_mean(self, metric: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]:
        share, who = self._step.share, f"What the metric {metric.name!r} is given"
        is_loss = metric is loss_tracker(self._model)
        if (sample_weight is None or is_loss) and _are_scalars(values) and self._is_counted(metric):
            value = tf.convert_to_tensor(values)
            values = self._losses.as_mean(value if value.dtype.is_floating else tf.cast(value, metric.dtype), who)
            if sample_weight is None:
                return values, tf.cast(share, metric.dtype)
        if sample_weight is None:
            return values, None
        if is_loss:
            return values, self._weight_of_loss(tf.convert_to_tensor(sample_weight))
        if is_output_loss(self._model, metric):
            # The output's length where it is fixed: by the number of rows, which ranks may differ in, or without rows.
            if Rows(self._step.data).size is not None:
                return values, tf.cast(self._rows, metric.dtype)
            return values, tf.cast(sample_weight, metric.dtype) * tf.cast(share, metric.dtype)
        if not tf.executing_eagerly() and _are_scalars(values, sample_weight):
            if not self._is_counted(metric):
                return values, sample_weight
            return self._losses.as_weighted(tf.cast(values, metric.dtype), tf.cast(sample_weight, metric.dtype), who)
        if self._may_be_wider_elsewhere(values, sample_weight):
            values, sample_weight = self._batch.equally_wide([values, sample_weight])
        return values, sample_weight

    def _weight_of_loss(self, given: tf.Tensor) -> tf.Tensor:
        """Returns the weight of this rank's loss in its mean, from the one that the step has given.

        Keras gives the length of the first input. That is this rank's part of the sum over the ranks if it is a number
        of rows; else the length counts once.
        """
        leaves = tf.nest.flatten(self._step.data)
        number, first = next(((n, leaf) for n, leaf in enumerate(leaves) if tf.is_tensor(leaf)), (0, None))
        if first is None or given.shape.rank != 0 or isinstance(first, tf.SparseTensor) or first.shape.rank == 0:
            return given
        weight = tf.cast(given, self._step.share.dtype)
        is_length = weight == tf.cast(tf.shape(first)[0], weight.dtype)
        if Rows(self._step.data).has_rows(number):  # or it is not known
            is_length &= weight != tf.cast(tf.maximum(self._rows, 1), weight.dtype)
        return tf.where(is_length, weight * self._step.share, weight)

    def _of_sum(self, metric: Any, values: Any) -> Any:
        if tf.executing_eagerly() or not _are_scalars(values) or not self._is_counted(metric):
            return values
        value = tf.cast(tf.convert_to_tensor(values), metric.dtype)
        return self._losses.as_sum(value, f"What the metric {metric.name!r} is given")

    def _is_counted(self, metric: Any) -> bool:
        return is_among_weighted(metric, self._model, joint=self._joint)

    def _may_be_wider_elsewhere(self, values: Any, weights: Any) -> bool:
        """Returns whether values have weights of their own within each row, and ranks may differ in their number.

        An eager step of the user's may pass them on some ranks only, and a message would wait for the others. In
        branches and functions of the step, and with XLA, no message is sent.
        """
        if not all(isinstance(each, tf.Tensor) and (each.shape.rank or 0) > 1 for each in (values, weights)):
            return False
        if get_keras_mask(values) is not None or is_compiled_by_xla():
            return False
        if tf.executing_eagerly():
            return not computes_custom_loss(self._model)
        return bool(None in values.shape[1:] and values.graph is self._step.share.graph)


def _are_scalars(*values: Any) -> bool:
    return all(tf.convert_to_tensor(each).shape.rank == 0 for each in values)
