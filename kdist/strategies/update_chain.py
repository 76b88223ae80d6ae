"""Updates of large variables one after the other, so that a step takes memory for one of them at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

LARGE_BYTES = 1 << 20
"""From this size on an update keeps a core busy by itself."""


class UpdateChain:
    """Makes each update of a large variable wait for the one before.

    An optimizer's rule computes several tensors of its variable's size. If all gradients come in one message,
    TensorFlow begins all updates at once: then it holds such tensors of all variables together.
    """

    def __init__(self) -> None:
        self._last: tf.Tensor | None = None

    def run(self, update: Callable[..., Any], variable: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Updates a variable, in a graph after the last one that this has updated.

        Args:
            update: callable that takes the other arguments.
            variable: `tf.Variable`.
            *args: what the update takes beside it.
            **kwargs: the same.

        Returns:
            What `update` returns.
        """
        if tf.executing_eagerly() or not _is_large(variable):
            return update(variable, *args, **kwargs)
        is_first = self._last is None or self._last.graph is not tf.compat.v1.get_default_graph()
        with tf.control_dependencies([] if is_first else [self._last]):
            result = update(variable, *args, **kwargs)
        # Of operations that use a variable, the next waits for the last that wrote it. This one takes no memory.
        self._last = tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
        return result


def _is_large(variable: Any) -> bool:
    is_known = isinstance(variable, tf.Variable) and hasattr(variable, "handle") and variable.shape.is_fully_defined()
    return is_known and math.prod(variable.shape) * variable.dtype.size >= LARGE_BYTES
