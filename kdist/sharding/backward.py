"""The backward pass in turn with messages, so that few whole gradients are in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kdist._tf_internals import add_control_inputs, control_outputs

AHEAD = 2
"""The gradients of a message wait for the one so many before: while one is sent, those of the next are computed."""


class PacedBackward:
    """Makes the backward pass wait for messages.

    TensorFlow computes gradients as early as it can. If messages take longer, the whole gradients of all weights wait
    in memory, which is what parts should save. What waits here is all that leads to the gradients of later messages
    only. So no product of the backward pass is kept in place of a gradient: what remains are the activations, which
    were there together at the end of the forward pass.

    Args:
        gradients: sequence of tensors and `tf.IndexedSlices`.
        messages: sequence of sequences of indices, the gradients of each message.
    """

    def __init__(self, gradients: Sequence[Any], messages: Sequence[Sequence[int]]) -> None:
        self._starts: dict[int, list[tf.Operation]] = {}  # by message
        if tf.executing_eagerly() or len(messages) <= AHEAD:
            return
        of_gradients: dict[tf.Operation, int] = {}
        for message, places in enumerate(messages):
            for operation in _operations([gradients[place] for place in places]):
                of_gradients.setdefault(operation, message)
        firsts = _first_messages(of_gradients)
        for operation, message in firsts.items():
            # A gradient that alone would wait, as those between synchronised layers, would keep what it is made from.
            waits_anyway = any(firsts.get(each.op) == message for each in operation.inputs)
            if message >= AHEAD and operation not in of_gradients and not waits_anyway:
                self._starts.setdefault(message, []).append(operation)

    def sent(self, message: int, received: Sequence[Any]) -> None:
        """Lets what leads to the gradients of a later message wait for one.

        Args:
            message: int, the index of a message.
            received: sequence of tensors and `tf.IndexedSlices`, what it has brought.
        """
        for operation in self._starts.get(message + AHEAD, ()):
            add_control_inputs(operation, _operations(received))


def _operations(tensors: Sequence[Any]) -> list[tf.Operation]:
    """Returns the operations that return tensors; those that were computed outside of a graph have none."""
    parts = [
        part
        for each in tensors
        for part in ([each.values, each.indices] if isinstance(each, tf.IndexedSlices) else [each])
    ]
    return [each.op for each in parts if tf.is_symbolic_tensor(each)]


def _first_messages(of_gradients: dict[tf.Operation, int]) -> dict[tf.Operation, int]:
    """Returns the first message that needs an operation, for operations that nothing else in the graph needs.

    Args:
        of_gradients: dict of the messages of gradients by the operations that return these.
    """
    nothing = -1
    firsts: dict[tf.Operation, int] = {}
    is_stateful: dict[str, bool] = {}  # by type
    for operation in reversed(tf.compat.v1.get_default_graph().get_operations()):
        users = [user for output in operation.outputs for user in output.consumers()] + control_outputs(operation)
        needs = [firsts.get(user, nothing) for user in users]
        first = min([*needs, of_gradients[operation]] if operation in of_gradients else needs, default=nothing)
        if first == nothing or not operation.inputs:
            continue
        # TensorFlow lets messages wait for what is stateful before them.
        if operation.type not in is_stateful:
            is_stateful[operation.type] = operation.op_def.is_stateful
        if not is_stateful[operation.type]:
            firsts[operation] = first
    return firsts
