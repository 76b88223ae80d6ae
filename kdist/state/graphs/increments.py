"""What the assignments of a step's graph add to a variable, as far as the graph shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.state.graphs.graph_copy import ASSIGNMENTS, GraphCopy, can_be_copied, copied, is_computed_of
from kdist.state.graphs.rank_dependence import computed_of

_COPIES = ("Identity", "Cast", "EnsureShape")
_VALUES = {  # the methods that add, and which of their values they add
    "assign_add": slice(None),
    "assign_sub": slice(None),
    "scatter_add": slice(1),
    "scatter_sub": slice(1),
    "scatter_nd_add": slice(1, None),
    "scatter_nd_sub": slice(1, None),
}
_MAX_SAMPLED = 10**5  # elements of a variable
_OTHERS = (0, 1, 100, -100)  # what all that is unknown is, in turn


class Increments:
    """Finds the terms that assignments add to a variable.

    A sum is found by its operations. Other ways to add to an integer (to a slice, by `tf.where`, by `tf.concat`) are
    found by computing what is assigned for a few values of the variable: if it is always as much more, it is added.

    Args:
        source: callable that takes a tensor, and returns that which a function has captured as this one.
    """

    def __init__(self, source: Callable[[tf.Tensor], tf.Tensor]) -> None:
        self._source = source
        self._sampled: dict[int, tuple[list[Any], list[Any] | None]] = {}
        self._values: dict[tuple[tf.Graph, str], np.ndarray | None] = {}  # of tensors that are known, or are not

    def terms(self, variable: tf.Variable, method: str, values: list[Any]) -> list[Any] | None:
        """Returns what an assignment adds to a variable; `None` if it replaces its value, or nothing is known.

        Args:
            variable: `tf.Variable`.
            method: str, the name of the method that assigns.
            values: list of tensors, arrays and numbers that it was given.
        """
        if not values:
            return None
        found = values[_VALUES[method]] if method in _VALUES else None
        if method in ASSIGNMENTS:
            found = self._terms_of_sum(values[0], variable.handle)
        if found is not None:  # what is added may depend on what is there: `v + (n - v)`
            return None if any(is_computed_of(variable.handle, each, self._source) for each in found) else found
        if not variable.dtype.is_integer:
            return None
        if id(values) not in self._sampled:
            self._sampled[id(values)] = values, self._sampled_terms(variable, method, values)
        return self._sampled[id(values)][1]

    def _terms_of_sum(self, value: Any, handle: Any) -> list[Any] | None:
        value = self._source(value)
        while tf.is_symbolic_tensor(value) and value.op.type in _COPIES:
            value = self._source(value.op.inputs[0])
        if not tf.is_symbolic_tensor(value):
            return None
        operation = value.op
        if operation.type == "ReadVariableOp":
            return [] if self._source(operation.inputs[0]) is handle else None
        operands = list(operation.inputs)
        if operation.type in ("TensorScatterAdd", "TensorScatterSub"):
            terms = self._terms_of_sum(operands[0], handle)
            return None if terms is None else [*terms, operands[2]]
        if operation.type not in ("AddV2", "Add", "Sub"):
            return None
        for place in (0,) if operation.type == "Sub" else (0, 1):
            terms = self._terms_of_sum(operands[place], handle)
            if terms is not None:
                return [*terms, *operands[:place], *operands[place + 1 :]]
        return None

    def constants(self, value: Any) -> list[Any]:
        """Returns the constants that a number or a tensor is computed from, by simple arithmetic."""
        value = self._source(value)
        if not tf.is_tensor(value):
            return [value]
        if tf.is_symbolic_tensor(value) and value.op.type in (*_COPIES, "Mul", "AddV2", "Add", "Sub"):
            return [constant for each in value.op.inputs for constant in self.constants(each)]
        return [self._static_value(value)]

    def _static_value(self, value: Any) -> Any:
        """Returns what a tensor is in each step, as `tf.shape(x)[0]` of a static shape; `None` if that is unknown."""
        value = self._source(value)
        known = tf.get_static_value(value)
        if known is not None or not tf.is_symbolic_tensor(value):
            return known
        key = (value.graph, value.name)
        if key not in self._values:
            self._values[key] = self._computed(value) if self._is_static(value) else None
        return self._values[key]

    def _is_static(self, value: tf.Tensor) -> bool:
        """Returns whether a tensor is computed from constants alone; not by recursion, for a network may be deep."""

        def is_end(tensor: Any) -> bool:
            return not tf.is_symbolic_tensor(tensor) or tf.get_static_value(tensor) is not None

        before = computed_of([value], is_end, self._source)
        return all(can_be_copied(each.op) and each.op.inputs for each in before)

    def _computed(self, value: tf.Tensor) -> np.ndarray:
        operands = [(self._static_value(each), each.dtype) for each in value.op.inputs]
        with tf.Graph().as_default() as graph:
            found = copied(value, [tf.constant(each, dtype) for each, dtype in operands])
        with tf.compat.v1.Session(graph=graph) as session:
            return session.run(found)

    def _sampled_terms(self, variable: tf.Variable, method: str, values: list[Any]) -> list[Any] | None:
        size = variable.shape.num_elements()
        if size is None or size > _MAX_SAMPLED:
            return None
        with tf.Graph().as_default() as graph:
            copy = GraphCopy(variable, self._source, self._static_value)
            try:
                new, old = copy.new_and_old(method, values)
                increment = new - old
            except (LookupError, TypeError, ValueError, tf.errors.OpError):
                return None
        if len(copy.unknown) > 1:  # of which each would have to take all values beside all of the others
            return None
        any_added = False
        with tf.compat.v1.Session(graph=graph) as session:
            for others in _OTHERS:
                try:
                    found = [session.run(increment, copy.feed(each, others)) for each in _samples(variable)]
                except tf.errors.OpError:  # an index that is out of bounds
                    if others in (0, 1):
                        return None
                    continue
                if any((each != found[0]).any() for each in found):
                    return None
                any_added = any_added or bool(found[0].any())
        if copy.unknown:
            return [] if any_added else None  # what replaces it now and then has not shown
        return [found[0]]


def _samples(variable: tf.Variable) -> Iterator[np.ndarray]:
    """Yields values of an integer: small, large and negative ones, as a maximum or a remainder changes some."""
    dtype = variable.dtype.as_numpy_dtype
    place = np.arange(variable.shape.num_elements()) % 16
    samples = [0 * place, 2 + 3 * place, np.iinfo(dtype).max // 2 - place]
    if np.iinfo(dtype).min < 0:
        samples.append(-2 - place)
    yield from (each.reshape(variable.shape).astype(dtype) for each in samples)
