r"""SGD's update as one kernel a variable, where Keras writes two to six operations, each a pass over memory.

TensorFlow's `ResourceApplyKerasMomentum` computes Keras' own expression, $v' = m v - \eta g$, and rounds it alike: the
results are equal bit for bit. Its Adam is no such kernel: that takes $1 - \beta$ from rounded numbers, and Keras from
exact ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist.training.step_wrappers import replaced

_DTYPES = (tf.float16, tf.float32, tf.float64)  # what has such kernels on CPUs and on GPUs: bfloat16 has none on GPUs


@contextlib.contextmanager
def fused_sgd(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Fuses an optimizer's updates while the context is open, if they are Keras' SGD's.

    Dense gradients of variables of `float16`, `float32` and `float64` are fused; rows of an embedding
    (`tf.IndexedSlices`) and other dtypes are updated as Keras does.

    Args:
        optimizer: `keras.optimizers.Optimizer`, the innermost one. One that does not update as Keras' SGD does, a
            subclass with an `update_step` of its own say, is left alone.
    """
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
        velocity = optimizer.momentums[optimizer._get_variable_index(variable)]
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=velocity.value.handle,
            lr=rate,
            grad=gradient,
            momentum=tf.cast(optimizer.momentum, variable.dtype),
            use_nesterov=optimizer.nesterov,
        )

    with replaced(optimizer, "update_step", fused):
        yield
