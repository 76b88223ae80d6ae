"""Which tensors of a step's graph may differ between the ranks: those that depend on the rank's rows."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from kdist._tf_internals import written_resources

_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_BRANCHES = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")
_CHOICES = ("If", "StatelessIf", "Case", "StatelessCase")  # by their first input; loops, by any
_LOOPS = ("While", "StatelessWhile")
_CALLS = (*_CHOICES, *_LOOPS, "PartitionedCall", "StatefulPartitionedCall")


class RankDependence:
    """Follows the data of a step through its graph, and through the graphs of functions, branches and loops.

    A step's data, and what is drawn at random or read from an iterator, differ between ranks, and so does all that is
    computed from them, what a variable holds that was set to such a value, and what happens in a branch that such a
    value chooses. Results of collectives are equal on all ranks.

    Args:
        root: `tf.Graph`, that of the step, which all ranks run equally. It is followed from where it is now: it may
            hold earlier steps.
        data: sequence of tensors of the step that differ between ranks.
        weights: sequence of `tf.Variable`, which stay equal on all ranks: their updates are reduced.
    """

    def __init__(self, root: tf.Graph, data: Sequence[tf.Tensor], weights: Sequence[tf.Variable]) -> None:
        self._root = root
        self._weights = {id(each.handle) for each in weights}
        self._equal: set[Any] = set()
        self._differing: set[Any] = {tensor_key(each) for each in data}
        self._written: set[int] = set()  # ids of handles of variables that were set to what differs
        self._is_chosen_by_rank: dict[str, bool] = {}  # by the name of a branch or loop
        self._num_followed: dict[tf.Graph, int] = {root: len(root.get_operations())}
        self._unknown: set[Any] = set()  # tensors that were computed, but not followed yet
        self._inner: dict[tf.Graph, list[tf.Graph]] = collections.defaultdict(list)  # graphs that write variables
        self._captures: dict[tf.Graph, dict[Any, Any]] = {}

    def add_equal(self, tensors: Sequence[tf.Tensor]) -> None:
        """Adds tensors that are equal on all ranks, before what is computed from them is followed."""
        self._equal |= {tensor_key(each) for each in tensors}

    def add_graph(self, graph: tf.Graph) -> None:
        """Adds a graph that writes a variable, so that it is followed where it is called."""
        while graph is not self._root and (outer := getattr(graph, "outer_graph", None)) is not None:
            if graph in self._inner[outer]:
                break
            self._inner[outer].append(graph)
            graph = outer

    def differs(self, tensors: Sequence[tf.Tensor], graph: tf.Graph) -> bool:
        """Returns whether one of a graph's tensors may differ, or whether the ranks may not run the graph equally."""
        self._follow(self._root)
        self._follow(graph)
        return any(tensor_key(each) in self._differing for each in tensors) or self._is_chosen(graph)

    def _is_chosen(self, graph: tf.Graph) -> bool:
        outer = getattr(graph, "outer_graph", None)
        if graph is self._root or outer is None:
            return False
        self._follow(outer)
        # A branch that is being traced is not known yet.
        by_rank = type(graph).__name__ in _BRANCHES and self._is_chosen_by_rank.get(graph.name, True)
        return by_rank or self._is_chosen(outer)

    def _follow(self, graph: tf.Graph) -> None:
        operations = graph.get_operations()
        start, self._num_followed[graph] = self._num_followed.get(graph, 0), len(operations)
        new = operations[start:]
        if new:
            self._captures[graph] = {tensor_key(inner): outer for outer, inner in getattr(graph, "captures", ())}
        self._unknown |= {tensor_key(output) for operation in new for output in operation.outputs}
        for operation in new:
            self._follow_operation(operation)
            self._unknown -= {tensor_key(output) for output in operation.outputs}

    def _follow_operation(self, operation: tf.Operation) -> None:
        inputs, outputs = list(operation.inputs), list(operation.outputs)
        if operation.type == "Placeholder":
            outer: Any = self._captures[operation.graph].get(tensor_key(outputs[0]))
            is_argument = outer is None
            self._mark(outputs, is_argument or (tf.is_symbolic_tensor(outer) and self.differs([outer], outer.graph)))
            return
        if _is_static_length(operation):
            return
        differing = [tensor_key(each) in self._differing for each in inputs]
        if operation.type == "IdentityN":  # of custom gradients: results, then arguments
            for output, differs in zip(outputs, differing, strict=True):
                self._mark([output], differs)
            return
        if operation.type in _CALLS:
            for graph in self._inner[operation.graph]:
                if self._can_follow(graph, operation.graph):
                    self._follow(graph)
        for name in _branches(operation):
            self._is_chosen_by_rank[name] = any(differing[:1] if operation.type in _CHOICES else differing)
        differs = any(differing) or "Random" in operation.type or operation.type.startswith("Iterator")
        handles = {id(self.source(each)) for each in inputs if each.dtype == tf.resource}
        if operation.type in _READS:
            differs = differs or not self._written.isdisjoint(handles)
        elif differs and handles and operation.type not in _CALLS:
            self._written |= {id(self.source(each)) for each in written_resources(operation)} - self._weights
        self._mark(outputs, differs)

    def _can_follow(self, graph: Any, outer: tf.Graph) -> bool:
        """Returns whether all that a graph has captured of the outer one is known."""
        captured = [each for each, _ in graph.captures if tf.is_symbolic_tensor(each) and each.graph is outer]
        return self._unknown.isdisjoint(map(tensor_key, captured))

    def _mark(self, tensors: Sequence[tf.Tensor], differs: bool) -> None:
        if differs:
            self._differing |= {tensor_key(each) for each in tensors} - self._equal

    def source(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor, or a variable's handle, that a function has captured as `tensor`."""
        while tf.is_symbolic_tensor(tensor) and tensor.op.type == "Placeholder":
            self._follow(tensor.graph)
            captured = self._captures.get(tensor.graph, {}).get(tensor_key(tensor))
            if captured is None:
                break
            tensor = captured
        return tensor

    def is_used(self, handle: Any, graph: tf.Graph, start: int, is_state: Callable[[Any], bool]) -> bool:
        """Returns whether a graph reads a variable, from some operation on, for more than to write such variables.

        Args:
            handle: the variable's handle.
            graph: the graph.
            start: int, the first operation's index.
            is_state: callable that takes a handle, and returns whether it is that of a variable that a layer keeps.
        """
        self._follow(graph)
        reads = [each for each in graph.get_operations()[start:] if each.type in _READS]
        pending = [each for each in reads if self.source(each.inputs[0]) is handle]
        seen = set(pending)
        while pending:
            operation = pending.pop()
            consumers = [each for output in operation.outputs for each in output.consumers()]
            written = [each for each in operation.inputs if each.dtype == tf.resource]
            if not consumers and not (written and all(is_state(self.source(each)) for each in written)):
                return True
            pending += [each for each in consumers if each not in seen]
            seen.update(consumers)
        return False


def _is_static_length(operation: tf.Operation) -> bool:
    """Returns whether an operation is `tf.shape(x)[n]` of a known length, beside lengths that a graph does not know."""
    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return False
    start, shape = tf.get_static_value(operation.inputs[1]), operation.inputs[0].op.inputs[0].shape
    is_one = operation.get_attr("shrink_axis_mask") == 1 and not operation.get_attr("new_axis_mask")
    return is_one and start is not None and shape.rank is not None and shape[int(start[0])] is not None


def computed_of(
    tensors: Sequence[Any],
    is_end: Callable[[Any], bool] = lambda _: False,
    source: Callable[[Any], Any] = lambda tensor: tensor,
) -> Iterator[Any]:
    """Yields tensors of a graph, and all of that graph that they are computed of.

    Args:
        tensors: sequence of tensors.
        is_end: callable that takes a tensor and returns whether it is left out, and what it alone is computed of.
        source: callable that takes a tensor, and returns that which a function has captured as this one, which is
            yielded in its place. One of another graph is followed there; one of no graph is not.
    """
    pending, seen = [source(each) for each in tensors], set()
    while pending:
        tensor = pending.pop()
        yield tensor
        if tf.is_symbolic_tensor(tensor) and tensor.op not in seen:
            seen.add(tensor.op)
            pending += [each for each in map(source, tensor.op.inputs) if not is_end(each)]


def tensor_key(tensor: Any) -> Any:
    """Returns what stands for a tensor in sets and dictionaries: a graph may have several objects for one."""
    return (tensor.graph, tensor.name) if tf.is_symbolic_tensor(tensor) else id(tensor)


def _branches(operation: tf.Operation) -> Iterator[str]:
    """Yields the names of the functions that an operation chooses from, or repeats."""
    if operation.type in _CHOICES + _LOOPS:
        attributes = operation.node_def.attr
        for name in ("then_branch", "else_branch", "branches", "cond", "body"):
            if name in attributes:
                listed = [each.name for each in attributes[name].list.func]
                yield from listed or [attributes[name].func.name]
