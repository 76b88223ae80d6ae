"""Variables that a step makes while it is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from kdist._tf_internals import ResourceVariable


def variable_with_value(kwargs: Mapping[str, Any]) -> tf.Variable | None:
    """Returns a variable that has its value, though a function is being traced that makes it, or `None`.

    TensorFlow gives such a variable its value when the function runs. But gradients and losses of all rows are found
    out, and slots are made in parts, while the function is traced: they read variables.

    Args:
        kwargs: mapping, the arguments of a variable creator. `None` is returned if their initial value is no function,
            or is computed of the graph's tensors.
    """
    if not (callable(kwargs.get("initial_value")) and tf.inside_function()):
        return None
    if kwargs.get("experimental_enable_variable_lifting") is False:
        return None
    unknown = ("collections", "colocate_with", "use_resource")
    arguments = {name: value for name, value in kwargs.items() if name not in unknown}
    device = getattr(kwargs.get("colocate_with"), "device", None)
    try:
        with tf.init_scope(), contextlib.nullcontext() if device is None else tf.device(device):
            return ResourceVariable(**{"distribute_strategy": tf.distribute.get_strategy(), **arguments})
    except (TypeError, ValueError, NotImplementedError):  # how TensorFlow refuses a tensor of another graph
        return None
