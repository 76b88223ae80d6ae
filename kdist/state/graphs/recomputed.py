"""Tensors of a step's graph, computed again from other values of some: of those of all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import tensorflow as tf

from kdist.state.graphs.graph_function import acts, calls, functions_of, has_own_gradient, imported, node_of
from kdist.state.graphs.rank_dependence import computed_of


@dataclasses.dataclass(frozen=True)
class RowReduction:
    """A tensor that a graph computes from rows, of which it is known what it is of the rows of all ranks.

    Attributes:
        tensor: the tensor.
        kind: str, what it is: a mean or a sum over the rows, given those before it, if it is computed from these, too;
            rows, each computed from one; or the shape of such rows, which differ in their number alone.
        count: scalar tensor, the number of elements over which it is the mean, where a step has chosen rows; or `None`.
    """

    tensor: tf.Tensor
    kind: Literal["mean", "sum", "rows", "shape"]
    count: tf.Tensor | None = None


def check_repeatable(operation: tf.Operation) -> None:
    """Checks that an operation may be repeated for other inputs, and that gradients pass through that.

    Raises:
        LookupError: if it may not, or they do not.
    """
    takes_handle = any(each.dtype == tf.resource for each in operation.inputs)
    if operation.type == "Placeholder" or takes_handle or has_own_gradient(operation.node_def) or acts(operation):
        raise LookupError(operation.type)


class Recomputed:
    """Tensors of a graph, computed again from other values of some.

    Args:
        is_changed: callable that takes a tensor and returns whether it is computed again.
        original: callable that takes a tensor that is taken as it is, and returns what to take in its place.

    Attributes:
        values: dictionary, the other values by the names of the tensors that they take the place of.
        taken: list of pairs, tensors that are taken as they are, and their identities, by which to differentiate.
    """

    def __init__(
        self,
        is_changed: Callable[[tf.Tensor], bool],
        original: Callable[[tf.Tensor], tf.Tensor] = lambda tensor: tensor,
    ) -> None:
        self._is_changed, self._original = is_changed, original
        self.values: dict[str, tf.Tensor] = {}
        self.taken: list[tuple[tf.Tensor, tf.Tensor]] = []

    def take(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor as it is, by which to differentiate."""
        original = self._original(tensor)
        self.values[tensor.name] = tf.identity(original)
        self.taken.append((original, self.values[tensor.name]))
        return self.values[tensor.name]

    def __call__(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor of the graph, computed from the other values."""
        if tensor.name in self.values:
            return self.values[tensor.name]
        if not self._is_changed(tensor):
            return self.take(tensor)

        def is_known(each: tf.Tensor) -> bool:
            return each.name in self.values or not self._is_changed(each)

        operations = {each.op.name: each.op for each in computed_of([tensor], is_known)}.values()
        called = [each for each in operations if calls(each)]
        functions = functions_of(called, are_differentiated=True) if called else []
        graph_def = tf.compat.v1.GraphDef(node=map(node_of, operations))
        inputs = {each.name: self(each) for operation in operations for each in operation.inputs if is_known(each)}
        outputs = [each.name for operation in operations for each in operation.outputs]
        results = imported(graph_def, functions, inputs, outputs, "of_all_ranks")
        self.values |= {name: each for name, each in zip(outputs, results, strict=True) if name not in self.values}
        return self.values[tensor.name]
