r"""SGD's update as one kernel per variable, in place of Keras' two to six operations, each a pass over memory.

TensorFlow's `ResourceApplyKerasMomentum` computes Keras' expression, $v' = m v - \eta g$, with equal rounding: results
are equal bit for bit. Its kernel of Adam rounds $1 - \beta$ differently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.optimizers import innermost, momentum_of
from kdist.keras_hooks.patching import patched
from kdist.step.update import Stage, Update

_DTYPES = (tf.float16, tf.float32, tf.float64)  # those with kernels on CPUs and GPUs


class FusedSGD(Stage):
    """Fuses the updates of Keras' SGD for dense gradients of `float16`, `float32` and `float64`.

    Keras updates `tf.IndexedSlices`, other dtypes, and subclasses that override `update_step`.
    """

    phase = "update"

    def __call__(self, update: Update, proceed: Callable[[], Any]) -> Any:
        """Runs the update with the fused kernels."""
        with fused_sgd(innermost(update.optimizer)):
            return proceed()


@contextlib.contextmanager
def fused_sgd(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Fuses the updates of an innermost optimizer while the context is open, if it updates as Keras' SGD does."""
    if getattr(type(optimizer), "update_step", None) is not keras.optimizers.SGD.update_step:
        yield
        return
    update_step = optimizer.update_step

    def fused(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not isinstance(gradient, tf.Tensor) or variable.dtype not in _DTYPES:
            update_step(gradient, variable, learning_rate)
            return
        gradient = tf.cast(gradient, variable.dtype)
        rate = tf.cast(learning_rate, variable.dtype)
        if not optimizer.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
            return
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=momentum_of(optimizer, variable).value.handle,
            lr=rate,
            grad=gradient,
            momentum=tf.cast(optimizer.momentum, variable.dtype),
            use_nesterov=optimizer.nesterov,
        )

    with patched(optimizer, "update_step", fused):
        yield
