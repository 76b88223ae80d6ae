"""The rate that all ranks know, by which one that a callback has set on some ranks only is noticed."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.optimizers import stored_learning_rate


class AgreedRate:
    """The user's rate of one optimizer, as all ranks know it.

    Args:
        optimizer: `keras.optimizers.Optimizer`, the innermost one.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._optimizer = optimizer
        self._rate = tf.Variable(self._stored(), dtype=tf.float64, trainable=False, name="kdist_agreed_rate")

    def set_to_stored(self) -> None:
        """Takes over the optimizer's rate, which is the same on all ranks."""
        self._rate.assign(tf.cast(self._stored(), tf.float64))

    def is_changed(self) -> tf.Tensor:
        """Returns whether a callback has set another rate on this rank: 1 or 0, a `float32` scalar."""
        return tf.cast(self._stored() != self._rate, tf.float32)

    def local_change(self) -> tf.Tensor:
        """Returns `[is_changed, is_changed * rate]`, a `float64` tensor, to be summed over the ranks."""
        stored = self._stored()
        is_changed = tf.cast(stored != self._rate, tf.float64)
        return tf.stack([is_changed, is_changed * stored])

    def apply_change(self, change: tf.Tensor) -> None:
        """Sets the mean of the changed rates, given the sum of `local_change` over the ranks."""
        rate = tf.where(change[0] > 0, tf.math.divide_no_nan(change[1], change[0]), self._rate)
        self._rate.assign(rate)
        variable = stored_learning_rate(self._optimizer)
        if isinstance(variable, keras.Variable):
            variable.assign(tf.cast(rate, variable.dtype))

    def _stored(self) -> Any:
        variable = stored_learning_rate(self._optimizer)
        # A schedule or a function is the same on all ranks.
        return tf.cast(variable.value, tf.float64) if isinstance(variable, keras.Variable) else tf.zeros((), tf.float64)
