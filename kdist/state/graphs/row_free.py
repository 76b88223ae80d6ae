"""Which tensors of a step's graph are not computed from rows, where some that are count as known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from kdist.state.graphs.rank_dependence import computed_of, tensor_key


class ComputedFrom:
    """Finds which operations of graphs are of some kind, or computed from one that is.

    Args:
        is_origin: callable that takes an operation and returns whether it is of that kind.
    """

    def __init__(self, is_origin: Callable[[tf.Operation], bool]) -> None:
        self._is_origin = is_origin
        self._found: dict[Any, tuple[set[str], int]] = {}

    def __call__(self, operation: tf.Operation) -> bool:
        """Returns whether an operation is of that kind, or computed from one."""
        graph = operation.graph
        names, start = self._found.get(graph, (set(), 0))
        operations = graph.get_operations()
        for each in operations[start:]:
            if self._is_origin(each) or any(part.op.name in names for part in each.inputs):
                names.add(each.name)
        self._found[graph] = names, len(operations)
        return operation.name in names


class RowFree:
    """Finds which tensors of a graph are not computed from rows, where some that are count as known.

    Args:
        known: sequence of tensors.
        depends_on_rows: callable that takes a tensor and returns whether it is computed from rows.
    """

    def __init__(self, known: Sequence[tf.Tensor], depends_on_rows: Callable[[tf.Tensor], bool]) -> None:
        self._known = {tensor_key(each) for each in known}  # and what is computed from them
        self._depends_on_rows = depends_on_rows

    def __call__(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor, of which the operations are followed, is not computed from rows."""
        return tensor_key(tensor) in self._known or not self._depends_on_rows(tensor)

    def followed(
        self, tensors: Sequence[tf.Tensor], is_end: Callable[[tf.Tensor], bool] = lambda _: False
    ) -> Iterator[tf.Operation]:
        """Yields the operations that compute tensors from rows, in the order of the graph.

        Args:
            tensors: sequence of tensors of one graph.
            is_end: callable that takes a tensor and returns whether what computes it is left out.
        """
        names = {each.op.name for each in computed_of(tensors, lambda each: self(each) or is_end(each))}
        for operation in tensors[0].graph.get_operations():
            if operation.name not in names:
                continue
            is_of_rows = [not self(each) for each in operation.inputs]
            if any(is_of_rows) or self._known.isdisjoint(map(tensor_key, operation.inputs)):
                yield operation
            else:
                self._known |= set(map(tensor_key, operation.outputs))
