"""Tensors of a step's graph, computed by the operations of the functions that it calls, in the place of the calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from kdist._tf_internals import body_of
from kdist.state.graphs.graph_function import functions_of, imported, is_call
from kdist.state.graphs.rank_dependence import tensor_key
from kdist.state.graphs.recomputed import Recomputed, check_repeatable
from kdist.state.graphs.row_free import RowFree

Targets = list[tuple[tf.Tensor, tf.Tensor]]
"""What is to be differentiated, with the gradients by it."""


class Inlined:
    """Computes tensors again, with what they are computed by in functions (`tf.function`) in the place of the calls.

    A function that has a variable, writes, sends, draws or has a gradient of its own is called as before.

    Args:
        depends_on_rows: callable that takes a tensor of the graph and returns whether it is computed from rows.
        ends: sequence of tensors that are taken as they are.
    """

    def __init__(self, depends_on_rows: Callable[[tf.Tensor], bool], ends: Sequence[tf.Tensor]) -> None:
        self._depends_on_rows = depends_on_rows
        self._ends = {tensor_key(each) for each in ends}
        self._recomputed = Recomputed(lambda tensor: tensor.name in self._changed)
        self._changed: set[str] = set()
        self._copied: set[str] = set()  # names of operations

    def __call__(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor of the same value; the tensor itself if no such call computes it."""
        if self._is_taken(tensor):
            return self._recomputed.values.get(tensor.name, tensor)
        start = len(tensor.graph.get_operations())
        recomputed = self._recomputed
        before = dict(recomputed.values), list(recomputed.taken), set(self._changed)
        try:
            return self._of(tensor)
        except (LookupError, ValueError):  # as of a branch that cannot be copied
            recomputed.values, recomputed.taken, self._changed = before
            return tensor
        finally:
            self._copied |= {each.name for each in tensor.graph.get_operations()[start:]}

    def original(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor of the step that is equal to one of the copy; the tensor itself if there is none.

        What is computed from it alone needs no copy then, as a network behind a layer that calls a function.
        """
        names = {copy.name: name for name, copy in self._recomputed.values.items()}
        name = tensor.name
        while name in names:
            name = names[name]
        return tensor.graph.get_tensor_by_name(name)

    def recorded(self, targets: Targets) -> Targets:
        """Returns what to differentiate in the place of targets that no tape has recorded, as they are of the copy."""
        copied = [(tensor, gradient) for tensor, gradient in targets if tensor.op.name in self._copied]
        if not copied:
            return targets
        taken = [
            (tensor, own)
            for tensor, own in self._recomputed.taken
            if tensor.dtype.is_floating and tensor.op.name not in self._copied
        ]
        gradients = tf.gradients(
            [tensor for tensor, _ in copied], [own for _, own in taken], [gradient for _, gradient in copied]
        )
        by_taken = [(tensor, each) for (tensor, _), each in zip(taken, gradients, strict=True) if each is not None]
        return [
            *(each for each in targets if each[0].op.name not in self._copied),
            *((tensor, tf.convert_to_tensor(each)) for tensor, each in by_taken),
        ]

    def _of(self, tensor: tf.Tensor) -> tf.Tensor:
        for operation in RowFree((), self._depends_on_rows).followed([tensor], self._is_taken):
            if _can_be_inlined(operation):
                self._inline(operation)
                self._changed |= {each.name for each in operation.outputs}
            elif any(each.name in self._changed for each in operation.inputs) and _is_repeatable(operation):
                self._changed |= {each.name for each in operation.outputs}
        return self._recomputed(tensor) if tensor.name in self._changed else tensor

    def _is_taken(self, tensor: tf.Tensor) -> bool:
        is_own = any(tensor.name == own.name for _, own in self._recomputed.taken)
        return is_own or tensor.name in self._recomputed.values or tensor_key(tensor) in self._ends

    def _inline(self, operation: tf.Operation) -> None:
        functions = {each.signature.name: each for each in functions_of([operation])}
        function = functions.pop(operation.get_attr("f").name)
        graph_def, inputs, outputs = body_of(function)
        taken = dict(zip(inputs, map(self._recomputed, operation.inputs), strict=True))
        results = imported(graph_def, list(functions.values()), taken, outputs, "inlined")
        for output, result in zip(operation.outputs, results, strict=True):
            self._recomputed.values[output.name] = self._of(result)


def _can_be_inlined(operation: tf.Operation) -> bool:
    if not is_call(operation.type) or any(each.dtype == tf.resource for each in operation.inputs):
        return False
    try:
        functions = functions_of([operation])
    except LookupError:
        return False
    names = {each.signature.name for each in functions}
    nodes = [node for each in functions for node in each.node_def]
    return not any(node.op in names or ("_gradient_op_type" in node.attr and not is_call(node.op)) for node in nodes)


def _is_repeatable(operation: tf.Operation) -> bool:
    try:
        check_repeatable(operation)
    except LookupError:
        return False
    return True
