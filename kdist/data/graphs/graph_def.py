"""`GraphDef` messages: their nodes, and the functions that these call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf


class GraphTooLargeError(Exception):
    """The `GraphDef` of a dataset has more than 2 GB, as it holds the arrays that the dataset begins with."""


def graph_of(dataset: tf.data.Dataset) -> Any:
    """Returns the `GraphDef` of a dataset.

    Raises:
        GraphTooLargeError: if it has more than 2 GB.
        tf.errors.OpError: if something in it cannot be serialised.
    """
    variant = tf.data.experimental.to_variant(dataset)
    serialized = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=1).numpy()
    if not serialized:  # what TensorFlow gives then
        raise GraphTooLargeError(f"The graph of {dataset} has more than 2 GB")
    return tf.compat.v1.GraphDef.FromString(serialized)


def node_lists(graph: Any) -> Iterator[Any]:
    """Yields the nodes of a graph, and those of each of its functions."""
    yield graph.node
    for function in graph.library.function:
        yield function.node_def


def other_tasks_nodes(graph: Any) -> list[Any]:
    """Returns the nodes of a graph that are bound to another task than this process is.

    TensorFlow binds a Python function to the host when it traces it, and joining a cluster gives the host another name.
    """
    if not (own := own_task()):
        return []
    bound = [node for nodes in node_lists(graph) for node in nodes if node.device]
    return [node for node in bound if _task(node.device) not in (own, ())]


def is_of_other_task(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset was made before this process joined a cluster: it cannot be iterated as it is."""
    own = own_task()
    return bool(own) and _task(tf.data.experimental.to_variant(dataset).device) != own


def own_task() -> tuple[Any, ...]:
    """Returns this process's job and task number in its cluster; `()` without one."""
    return _task(tf.config.list_logical_devices("CPU")[0].name)


def _task(device: str) -> tuple[Any, ...]:
    spec = tf.DeviceSpec.from_string(device)
    return () if spec.job is None else (spec.job, spec.task)


def called_functions(nodes: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Yields each node with the name of each function that it may call."""
    for node in nodes:
        yield node, node.op
        yield from ((node, function.name) for function in _function_attributes(node))


def rename_functions(graph: Any, suffix: str) -> None:
    """Renames all functions of a graph: the runtime refuses a second body under a name that it knows."""
    names = {function.signature.name for function in graph.library.function}

    def renamed(name: str) -> str:
        return name + suffix if name in names else name

    for function in graph.library.function:
        function.signature.name += suffix
    for gradient in graph.library.gradient:
        gradient.function_name = renamed(gradient.function_name)
        gradient.gradient_func = renamed(gradient.gradient_func)
    for nodes in node_lists(graph):
        for node in nodes:
            node.op = renamed(node.op)
            for function in _function_attributes(node):
                function.name = renamed(function.name)


def _function_attributes(node: Any) -> Iterator[Any]:
    for attr in node.attr.values():
        if attr.WhichOneof("value") == "func":
            yield attr.func
        elif attr.WhichOneof("value") == "list":
            yield from attr.list.func
