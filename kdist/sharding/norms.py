"""An optimizer that updates parts of weights: it clips by the norms of whole gradients, and checks whole ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.keras_hooks.optimizers import CLIP, innermost
from kdist.keras_hooks.patching import patched


@contextlib.contextmanager
def whole_norms(outer: keras.optimizers.Optimizer, are_parts: Sequence[bool], engine: Engine) -> Iterator[None]:
    """Makes an optimizer clip and check for overflow as if it had whole gradients, while the context is open.

    Args:
        outer: `keras.optimizers.Optimizer`.
        are_parts: sequence of bool, of each gradient whether this rank has its part; else it is whole on all ranks.
        engine: `Engine`.
    """
    optimizer = innermost(outer)
    clip_parts = getattr(optimizer, CLIP)

    def clip(gradients: Sequence[Any]) -> Any:
        if not (optimizer.clipnorm or optimizer.global_clipnorm):
            return clip_parts(gradients)
        sums = [tf.cast(tf.reduce_sum(tf.square(_values(each))), tf.float64) for each in gradients]
        is_part = tf.constant(list(are_parts))
        own = tf.stack(sums)
        (totals,) = engine.allreduce([tf.where(is_part, own, tf.zeros_like(own))])
        totals = tf.where(is_part, totals, own)
        if optimizer.clipnorm:
            factors = tf.unstack(optimizer.clipnorm / tf.maximum(tf.sqrt(totals), optimizer.clipnorm))
            return [_times(each, factor) for each, factor in zip(gradients, factors, strict=True)]
        norm, most = tf.sqrt(tf.reduce_sum(totals)), tf.constant(optimizer.global_clipnorm, tf.float64)
        factor = most * tf.minimum(1.0 / norm, 1.0 / most) + (norm - norm)  # NaN if the norm is not finite
        # Sparse ones become dense here, as in Keras: Adam then squares the sum of a row's readings.
        return [_times(tf.convert_to_tensor(each), factor) for each in gradients]

    def check_finite(gradients: Sequence[Any]) -> tf.Tensor:
        wrong = [tf.reduce_any(~tf.math.is_finite(_values(each))) for each in gradients if each is not None]
        (num_wrong,) = engine.allreduce([tf.cast(tf.reduce_any(wrong), tf.int32)])
        return tf.equal(num_wrong, 0)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(optimizer, CLIP, clip))
        if outer is not optimizer:
            stack.enter_context(patched(outer, "check_finite", check_finite))
        yield


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    values = _values(gradient)
    values = values * tf.cast(factor, values.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values
