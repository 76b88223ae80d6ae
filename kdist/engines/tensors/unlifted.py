"""Variables that several functions share."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def unlifted_variable(initial: Any, name: str | None = None) -> tf.Variable:
    """Returns a variable that is not trained and belongs to no `tf.function`. Must be called in `tf.init_scope`.

    TensorFlow counts a variable that is made during a trace as one of the traced function's own, lifts its initial
    value out of the graph, and traces the function a second time. This variable is shared by several functions.

    Args:
        initial: tensor or what converts to one, the first value.
        name: str or `None`, the variable's name.
    """
    return tf.Variable(initial, trainable=False, name=name, experimental_enable_variable_lifting=False)
