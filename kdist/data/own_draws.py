"""A `map` of a pipeline that runs for a rank's own samples: its random numbers are then the rank's own, too.

Its function was traced when the user made the dataset, with seeds that are equal on all ranks: the n-th sample of each
would be flipped alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from kdist._tf_internals import add_function
from kdist.data import graph_order


def with_own_draws(function: Any, owner: Any, rank: int) -> Callable[..., list[tf.Tensor]]:
    """Returns a function that draws other random numbers on each rank: seeds, and Keras' generators, fold the rank in.

    The chief's stay what they are, and so do draws without any seed, which differ by themselves. Stateless draws, and
    those of a `tf.random.Generator`, are the user's own affair.

    Args:
        function: concrete function.
        owner: the user's dataset object; it keeps the states that are made, so that a second `fit` goes on with them.
        rank: int.
    """
    if rank == 0:
        return function
    captured = [_own_state(function, tensor, owner, rank) for tensor in function.captured_inputs]
    graph = function.graph.as_graph_def()
    seeded = [_fold(nodes, rank) for nodes in graph_order.node_lists(graph)]
    is_same = all(one is other for one, other in zip(captured, function.captured_inputs, strict=True))
    if is_same and not any(seeded):
        return function
    graph_order.rename_functions(graph, f"_of_rank_{rank}")
    for each in graph.library.function:
        add_function(each)

    def call(*flat: tf.Tensor) -> list[tf.Tensor]:
        names = [each.name for each in function.inputs]
        inside = map(tf.compat.v1.get_default_graph().capture, captured)
        return tf.graph_util.import_graph_def(
            graph,
            input_map=dict(zip(names, [*flat, *inside], strict=True)),
            return_elements=[each.name for each in function.outputs],
            name="own",
        )

    return call


def _fold(nodes: Iterable[Any], rank: int) -> bool:
    """Folds the rank into the seeds of nodes, in place; returns whether there were any."""
    seeded = [node for node in nodes if "seed" in node.attr and "seed2" in node.attr]
    seeded = [node for node in seeded if node.attr["seed"].i or node.attr["seed2"].i]
    for node in seeded:
        node.attr["seed2"].i = graph_order.derived_seed(node.attr["seed2"].i % (1 << 32), rank)
    return bool(seeded)


def _own_state(function: Any, tensor: tf.Tensor, owner: Any, rank: int) -> tf.Tensor:
    """Returns what takes the place of a captured tensor: of a seed generator's state this rank's own."""
    for variable in function.graph.variables:
        if variable.handle is tensor and "seed_generator_state" in variable.name:
            kept = owner.__dict__.setdefault("_kdist_own_states", {})
            if id(variable) not in kept:
                seed, *rest = variable.numpy().tolist()
                state = [graph_order.derived_seed(seed, rank), *rest]
                kept[id(variable)] = variable, tf.Variable(state, dtype=variable.dtype, trainable=False)
            return kept[id(variable)][1].handle
    return tensor
