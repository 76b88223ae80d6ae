"""`Mean` and `Sum` metrics in a rank's step: what they are given is weighted as in the global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import keras
import tensorflow as tf
from keras.src.backend.common.masking import get_keras_mask

from kdist._tf_internals import is_compiled_by_xla
from kdist.keras_hooks.metrics import is_among_weighted
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.trainer import computes_custom_loss, is_output_loss, loss_tracker


class NumbersOfStep(Protocol):
    """What a step knows of the numbers that it gives to metrics."""

    @property
    def share(self) -> tf.Tensor:
        """The rank's share of the rows of the global batch, a scalar tensor."""
        ...

    @property
    def fixed_rows(self) -> tf.Tensor | None:
        """The number of the rank's rows, an `int64` scalar; `None` if the step takes any number of them."""
        ...

    @property
    def is_of_all(self) -> bool:
        """Whether what is given now is that of the global batch."""
        ...

    def weight_of_loss(self, given: tf.Tensor) -> tf.Tensor:
        """Returns the weight of a loss, from the one that Keras gives it: the length of the first input."""
        ...

    def as_mean(self, value: tf.Tensor, who: str) -> tf.Tensor:
        """Returns what is counted of a scalar that counts as a mean over the rank's rows; `who` says what it is."""
        ...

    def as_sum(self, value: tf.Tensor, who: str) -> tf.Tensor:
        """Returns this rank's part of a scalar that is to be added."""
        ...

    def as_weighted(self, value: tf.Tensor, weight: tf.Tensor, who: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns what is counted on this rank of a scalar and its weight."""
        ...

    def equally_wide(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns tensors padded with zeros to the widths that they have on other ranks."""
        ...


@contextlib.contextmanager
def weighted_metrics(model: keras.Model, numbers: NumbersOfStep, *, joint: bool) -> Iterator[None]:
    """Weights what is given to a model's `Mean` and `Sum` metrics as in the global batch.

    A scalar is the mean of a batch. Weighted by the ranks' shares, N of them equal that of the global batch. What a
    `Sum` is given may also be a sum over rows. A row of time steps is the mean of those that count, over the width of
    the batch, which is that of the widest rank.

    Args:
        model: `keras.Model`.
        numbers: `NumbersOfStep`.
        joint: bool, whether `joint_metrics` and what is nested in them count the global batch, without a weight.
    """
    weights = _Weights(model, numbers, joint=joint)
    original, original_of_sum = keras.metrics.Mean.update_state, keras.metrics.Sum.update_state

    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        if not numbers.is_of_all:
            values, sample_weight = weights.of_mean(self, values, sample_weight)
        return original(self, values, sample_weight=sample_weight)

    def update_sum(self: Any, values: Any, sample_weight: Any = None) -> Any:
        if not numbers.is_of_all and sample_weight is None:
            values = weights.of_sum(self, values)
        return original_of_sum(self, values, sample_weight=sample_weight)

    # The classes, as `MeanMetricWrapper` calls its parent's method.
    with (
        patched(keras.metrics.Mean, "update_state", update_state),
        patched(keras.metrics.Sum, "update_state", update_sum),
    ):
        yield


class _Weights:
    """What metrics of a model are given in place of numbers and their weights."""

    def __init__(self, model: keras.Model, numbers: NumbersOfStep, *, joint: bool) -> None:
        self._model, self._numbers, self._joint = model, numbers, joint

    def of_mean(self, metric: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]:
        numbers, who = self._numbers, f"What the metric {metric.name!r} is given"
        is_loss = metric is loss_tracker(self._model)
        if (sample_weight is None or is_loss) and _are_scalars(values) and self._is_counted(metric):
            value = tf.convert_to_tensor(values)
            values = numbers.as_mean(value if value.dtype.is_floating else tf.cast(value, metric.dtype), who)
            if sample_weight is None:
                sample_weight = tf.cast(numbers.share, metric.dtype)
                return values, sample_weight
        if sample_weight is None:
            return values, None
        if is_loss:
            return values, numbers.weight_of_loss(tf.convert_to_tensor(sample_weight))
        if is_output_loss(self._model, metric):
            # The output's length where it is fixed: by the number of rows, which ranks may differ in, or without rows.
            if (fixed := numbers.fixed_rows) is not None:
                return values, tf.cast(fixed, metric.dtype)
            return values, tf.cast(sample_weight, metric.dtype) * tf.cast(numbers.share, metric.dtype)
        if not tf.executing_eagerly() and _are_scalars(values, sample_weight):
            if not self._is_counted(metric):
                return values, sample_weight
            return numbers.as_weighted(tf.cast(values, metric.dtype), tf.cast(sample_weight, metric.dtype), who)
        if self._may_be_wider_elsewhere(values, sample_weight):
            values, sample_weight = numbers.equally_wide([values, sample_weight])
        return values, sample_weight

    def of_sum(self, metric: Any, values: Any) -> Any:
        if tf.executing_eagerly() or not _are_scalars(values) or not self._is_counted(metric):
            return values
        value = tf.cast(tf.convert_to_tensor(values), metric.dtype)
        return self._numbers.as_sum(value, f"What the metric {metric.name!r} is given")

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
        return bool(None in values.shape[1:] and values.graph is self._numbers.share.graph)


def _are_scalars(*values: Any) -> bool:
    return all(tf.convert_to_tensor(each).shape.rank == 0 for each in values)
