"""Gradients of a number of a graph, as far as its operations have any."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from kdist._tf_internals import has_gradient
from kdist.state.graphs.graph_function import is_call
from kdist.state.graphs.rank_dependence import computed_of, tensor_key


def gradients_of(value: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
    """Returns the gradients of a number by tensors that it is computed of, each as if the others were constants.

    The results of operations that cannot be differentiated, as of `tf.math.bincount`, count as constants, too: a tape
    that had recorded one would raise. TensorFlow differentiates calls of functions without asking for their gradients.

    Args:
        value: symbolic tensor.
        tensors: sequence of symbolic tensors.

    Returns:
        A list; `None` for tensors of which the number is not computed.
    """
    with contextlib.suppress(LookupError):
        return tf.gradients(value, tensors, stop_gradients=tensors)
    keys = {tensor_key(each) for each in tensors}
    constants = [
        each
        for each in computed_of([value], lambda tensor: tensor_key(tensor) in keys)
        if tf.is_symbolic_tensor(each) and not (is_call(each.op.type) or has_gradient(each.op))
    ]
    return tf.gradients(value, tensors, stop_gradients=[*tensors, *constants])
