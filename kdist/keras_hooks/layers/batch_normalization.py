"""Keras' `BatchNormalization(synchronized=True)` behind a mask, where Keras takes a replica's own moments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.patching import patched

_MOMENTS = "_moments"


@contextlib.contextmanager
def synchronized_moments(
    tell_of_others: Callable[[str], None], note: Callable[[Sequence[tf.Tensor]], None] = lambda moments: None
) -> Iterator[None]:
    """Makes synchronised layers take the moments of all replicas' unmasked elements while the context is open.

    Args:
        tell_of_others: callable that takes the name of each layer that is not synchronised.
        note: callable that takes the mean and the variance by which a layer normalizes.
    """
    moments = getattr(keras.layers.BatchNormalization, _MOMENTS)

    def noted_moments(layer: Any, inputs: tf.Tensor, mask: tf.Tensor | None) -> Any:
        found = masked_moments(layer, inputs, mask)
        note(found)
        return found

    def masked_moments(layer: Any, inputs: tf.Tensor, mask: tf.Tensor | None) -> Any:
        if not layer.synchronized:
            tell_of_others(layer.name)
        if mask is None or not layer.synchronized:
            return moments(layer, inputs, mask)
        axes = layer._reduction_axes
        unmasked = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))

        def summed(*values: tf.Tensor) -> Any:
            # The rank's sums, and those of all.
            sums = [
                tf.reduce_sum(tf.where(unmasked, each, tf.zeros_like(each)), axes, keepdims=True) for each in values
            ]
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, sums)

        total, count = summed(inputs, tf.ones_like(inputs))
        count += keras.backend.epsilon()  # as Keras does
        mean = total / count
        (squares,) = summed(tf.square(inputs - mean))
        return tf.squeeze(mean, axes), tf.squeeze(squares / count, axes)

    with patched(keras.layers.BatchNormalization, _MOMENTS, noted_moments):
        yield
