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
        values: sequence of tensors, arrays and numbers that the method was given: indices and updates, or the values,
            the indices, and perhaps the shape of `tf.IndexedSlices`.
    """
    operation, is_by_places = _OPERATIONS.get(method.rpartition("_")[2]), method.startswith("scatter_nd_")
    if operation is None or not method.startswith("scatter_") or len(values) not in ((2,) if is_by_places else (2, 3)):
        return None
    try:
        indices, updates = values if is_by_places else (tf.expand_dims(values[1], -1), values[0])
        return operation(variable, indices, tf.cast(updates, variable.dtype))
    except (TypeError, ValueError, tf.errors.OpError):  # of nested lists of tensors, flattened
        return None
