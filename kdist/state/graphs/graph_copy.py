"""A copy of the part of a step's graph that computes a variable's new value, to compute it for other old values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist._tf_internals import has_state
from kdist.keras_hooks.variables import DIRECT_ASSIGN
from kdist.state.graphs.graph_function import node_of
from kdist.state.graphs.rank_dependence import computed_of

ASSIGNMENTS = ("assign", DIRECT_ASSIGN)
"""The methods that replace all of a variable."""


class GraphCopy:
    """A copy, in the default graph, of what a value is computed by; the variable and what is unknown are placeholders.

    Args:
        variable: `tf.Variable`.
        source: callable, as that of `Increments`.
        static_value: callable that returns what a tensor is in each step, or `None`.
    """

    def __init__(self, variable: tf.Variable, source: Callable[[Any], Any], static_value: Callable[[Any], Any]) -> None:
        self._handle, self._source, self._static_value = variable.handle, source, static_value
        self._variable = tf.compat.v1.placeholder(variable.dtype, variable.shape)
        self.unknown: list[tuple[tf.Tensor, list[int]]] = []  # a placeholder of a scalar does not say its shape
        self._made: dict[str, tf.Tensor] = {}

    def new_and_old(self, method: str, values: Sequence[Any]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns what a method assigns, and what was there before.

        Raises:
            LookupError: if that is not known.
        """
        made = [self._made_of(each) for each in values]
        if method in ASSIGNMENTS:
            return made[0], self._variable
        if method == "scatter_update":
            return made[0], tf.gather(self._variable, made[1])
        if method == "scatter_nd_update":
            return self._joined(made[1:]), tf.gather_nd(self._variable, made[0])
        if method == "_strided_slice_assign":  # its arguments in the order of their names
            names = ("begin", "begin_mask", "ellipsis_mask", "end", "end_mask", "new_axis_mask", "shrink_axis_mask")
            arguments = dict(zip((*names, "strides"), (*values[:8],), strict=True))
            arguments |= {name: made[place] for name, place in (("begin", 0), ("end", 3), ("strides", 7))}
            old = tf.raw_ops.StridedSlice(input=self._variable, **arguments)
            return self._joined(made[8:]), old
        raise LookupError(method)

    def feed(self, value: np.ndarray, others: int) -> dict[tf.Tensor, np.ndarray]:
        """Returns what to compute a tensor of the copy from: the variable's value, a number for all that is unknown.

        Args:
            value: array of the variable's shape and dtype.
            others: int, the number, which each placeholder of an unknown tensor takes in its own dtype.
        """
        return {self._variable: value, **{each: np.full(shape, others) for each, shape in self.unknown}}

    def _joined(self, parts: list[tf.Tensor]) -> tf.Tensor:
        return parts[0] if len(parts) == 1 else tf.stack(parts)

    def _made_of(self, value: Any) -> tf.Tensor:
        value = self._source(value)
        if not tf.is_symbolic_tensor(value):
            return tf.constant(value.numpy() if tf.is_tensor(value) else value)
        key = f"{id(value.graph)} {value.name}"
        if key not in self._made:
            self._made[key] = self._make(value)
        return self._made[key]

    def _make(self, value: tf.Tensor) -> tf.Tensor:
        operation = value.op
        if not is_computed_of(self._handle, value, self._source):
            known = self._static_value(value)
            if known is not None:
                return tf.constant(known, value.dtype)
            if not value.shape.is_fully_defined() or value.dtype in (tf.resource, tf.variant, tf.string):
                raise LookupError(value)
            made = tf.compat.v1.placeholder(value.dtype, value.shape)
            self.unknown.append((made, value.shape.as_list()))
            return made
        is_own = bool(operation.inputs) and self._source(operation.inputs[0]) is self._handle
        if operation.type == "ReadVariableOp" and is_own:
            return self._variable
        if operation.type == "ResourceGather" and is_own and not operation.get_attr("batch_dims"):
            return tf.gather(self._variable, self._made_of(operation.inputs[1]))
        if operation.type == "ResourceGatherNd" and is_own:
            return tf.gather_nd(self._variable, self._made_of(operation.inputs[1]))
        if not can_be_copied(operation):
            raise LookupError(value)
        return copied(value, [self._made_of(each) for each in operation.inputs])


def is_computed_of(handle: Any, value: Any, source: Callable[[Any], Any]) -> bool:
    """Returns whether a value is computed from what a variable holds.

    Args:
        handle: the variable's handle.
        value: tensor, array or number.
        source: callable, as that of `Increments`.
    """
    return any(each is handle for each in computed_of([value], source=source))


def can_be_copied(operation: tf.Operation) -> bool:
    """Returns whether an operation has one result for given inputs, and is one by itself: it calls no function."""
    is_call = any(each.HasField("func") for each in operation.node_def.attr.values())
    return not (has_state(operation.type) or is_call)


def copied(value: tf.Tensor, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns an operation's output for other inputs, in the default graph."""
    node = node_of(value.op)
    del node.input[:]
    node.input.extend(f"operand_{place}" for place in range(len(inputs)))
    found = tf.graph_util.import_graph_def(
        tf.compat.v1.GraphDef(node=[node]),
        {f"operand_{place}:0": each for place, each in enumerate(inputs)},
        [f"{node.name}:{value.value_index}"],
        name="copy",
    )
    return found[0]
