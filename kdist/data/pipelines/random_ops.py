"""Random ops in a `map` that runs for a rank's own samples only: each rank draws other numbers.

The function of the `map` was traced when the user made the dataset, with seeds that are equal on all ranks: the n-th
sample of each rank would be augmented equally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from kdist._tf_internals import add_function
from kdist.data.graphs.dataset_internals import resources_of
from kdist.data.graphs.graph_def import node_lists, rename_functions
from kdist.data.pipelines.determinism import derived_seed


def with_rank_seeds(function: Any, dataset: Any, rank: int) -> Callable[..., list[tf.Tensor]]:
    """Returns a function that draws other random numbers on each rank: the rank is folded into its seeds.

    Seeds of ops and Keras' seed generators are covered. Rank 0 draws what the user's function draws. Draws without any
    seed differ by themselves. Stateless draws, and those of a `tf.random.Generator`, are left to the user.

    Args:
        function: concrete function.
        dataset: the user's dataset object; the states of generators are kept with it, so that a second `fit` continues.
        rank: int.
    """
    if rank == 0:
        return function
    captured = [_rank_state(function, tensor, dataset, rank) for tensor in function.captured_inputs]
    graph = function.graph.as_graph_def()
    seeded = [_fold_rank(nodes, rank) for nodes in node_lists(graph)]
    is_same = all(one is other for one, other in zip(captured, function.captured_inputs, strict=True))
    if is_same and not any(seeded):
        return function
    rename_functions(graph, f"_of_rank_{rank}")
    for each in graph.library.function:
        add_function(each)

    def call(*flat: tf.Tensor) -> list[tf.Tensor]:
        names = [each.name for each in function.inputs]
        inside = map(tf.compat.v1.get_default_graph().capture, captured)
        return tf.graph_util.import_graph_def(
            graph,
            input_map=dict(zip(names, [*flat, *inside], strict=True)),
            return_elements=[each.name for each in function.outputs],
            name=f"rank_{rank}",
        )

    return call


def _fold_rank(nodes: Iterable[Any], rank: int) -> bool:
    """Folds the rank into the seeds of nodes, in place; returns whether there were any."""
    seeded = [node for node in nodes if "seed" in node.attr and "seed2" in node.attr]
    seeded = [node for node in seeded if node.attr["seed"].i or node.attr["seed2"].i]
    for node in seeded:
        node.attr["seed2"].i = derived_seed(node.attr["seed2"].i % (1 << 32), rank)
    return bool(seeded)


def _rank_state(function: Any, tensor: tf.Tensor, dataset: Any, rank: int) -> tf.Tensor:
    """Returns what replaces a captured tensor: for the state of a Keras seed generator, a state of this rank."""
    for variable in function.graph.variables:
        if variable.handle is tensor and "seed_generator_state" in variable.name:
            kept = resources_of(dataset).setdefault("rank states by variable", {})
            if id(variable) not in kept:
                seed, *rest = variable.numpy().tolist()
                state = [derived_seed(seed, rank), *rest]
                kept[id(variable)] = variable, tf.Variable(state, dtype=variable.dtype, trainable=False)
            return kept[id(variable)][1].handle
    return tensor
