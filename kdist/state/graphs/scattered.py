"""What a variable holds after one of its methods has written some of its rows, as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_OPERATIONS = {
    "add": tf.tensor_scatter_nd_add,
    "max": tf.tensor_scatter_nd_max,
    "min": tf.tensor_scatter_nd_min,
    "sub": tf.tensor_scatter_nd_sub,
    "update": tf.tensor_scatter_nd_update,
}


def scattered(variable: tf.Variable, method: str, values: Sequence[Any]) -> tf.Tensor | None:
    """Returns the new value of a variable, of its shape and dtype; `None` where no tensor operation computes it.

    Args:
        variable: `tf.Variable`.
        method: str, the name of its method, as `"scatter_nd_update"`.
        values: sequence of tensors, arrays and numbers that the method was given: indices and updates, or the values
            and indices of `tf.IndexedSlices`.
    """
    operation = _OPERATIONS.get(method.rpartition("_")[2])
    if operation is None or not method.startswith("scatter_") or len(values) < 2:
        return None
    indices, updates = values[:2] if method.startswith("scatter_nd_") else (tf.expand_dims(values[1], -1), values[0])
    return operation(variable, indices, tf.cast(updates, variable.dtype))
