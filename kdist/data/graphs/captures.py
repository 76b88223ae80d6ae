"""What the functions of a `tf.data` pipeline capture: lookup tables, variables, tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kdist.data.graphs.graph_def import node_lists

# The states of `tf.random.Generator` and of Keras' seed generators, which may differ between ranks.
_RANDOM_STATES = ("StateVar", "seed_generator_state")


def table_entries(function: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the keys and the values of each lookup table that a concrete function captures, as arrays.

    A table whose types cannot be told yields the number of its entries.
    """
    for tensor in function.captured_inputs:
        if tensor.dtype != tf.resource or "lookup::" not in str(tensor):
            continue
        types = _types_of_table(function, tensor)
        if types is None:
            size = tf.raw_ops.LookupTableSizeV2(table_handle=tensor).numpy().reshape(1)
            yield size, size
        else:
            keys, values = tf.raw_ops.LookupTableExportV2(table_handle=tensor, Tkeys=types[0], Tvalues=types[1])
            yield keys.numpy(), values.numpy()


def values_captured(function: Any) -> Iterator[Any]:
    """Yields the values of the variables and tensors that a concrete function captures, as arrays.

    Those of random generators are left out; see `random_states`.
    """
    for variable in function.graph.variables:
        if not _is_random_state(variable):
            yield variable.numpy()
    for tensor in function.captured_inputs:
        if tensor.dtype not in (tf.resource, tf.variant):
            yield tensor.numpy()


def random_states(function: Any) -> list[list[int]]:
    """Returns the states of random generators that a concrete function captures."""
    return [each.numpy().tolist() for each in function.graph.variables if _is_random_state(each)]


def _is_random_state(variable: Any) -> bool:
    return any(name in variable.name for name in _RANDOM_STATES)


def _types_of_table(function: Any, table: tf.Tensor) -> tuple[Any, Any] | None:
    """Returns the types of a table's keys and values: TensorFlow ends the process if it is asked for others."""
    placeholders = [inside for outside, inside in function.graph.captures if outside is table]
    users = [user for placeholder in placeholders for user in placeholder.consumers()]
    found = {(user.get_attr("Tin"), user.get_attr("Tout")) for user in users if _is_table_op(user.type)}
    if not found:  # used in an inner function: told if all tables of the function have the same types
        nodes = [node for nodes in node_lists(function.graph.as_graph_def()) for node in nodes]
        found = {
            (tf.as_dtype(node.attr["Tin"].type), tf.as_dtype(node.attr["Tout"].type))
            for node in nodes
            if _is_table_op(node.op)
        }
    return found.pop() if len(found) == 1 else None


def _is_table_op(op: str) -> bool:
    return re.fullmatch(r"LookupTable(Find|Insert|Import)V2", op) is not None
