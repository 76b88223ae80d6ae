"""The order of a `tf.data` graph made equal on all ranks: unseeded shuffles get a seed, sloppy ops are deterministic.

An unseeded shuffle has another order on each rank: a sample is then seen twice, another never. A seeded shuffle has
another order, too, after one rank has iterated the dataset by itself. Seeded shuffles that reshuffle therefore get a
seed generator of kdist's, which is kept with the user's dataset. It leaves out the orders that rank 0 has made by hand.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.data.graphs.dataset_internals import (
    GENERATORS_BY_NODE,
    SKIPPED,
    SKIPPED_BY_NODE,
    flat_structure,
    from_variant,
    resources_of,
    seeded_shuffles,
)
from kdist.data.graphs.graph_def import (
    GraphTooLargeError,
    called_functions,
    graph_of,
    node_lists,
    other_tasks_nodes,
    rename_functions,
)
from kdist.errors import DataError

_log = logging.getLogger("kdist")

# The positions of the first of two seeds, and of the seed generator, among the inputs of a dataset's node.
_SEED_INPUTS: dict[str, tuple[int, int | None]] = {
    "RandomDataset": (0, None),
    "RandomDatasetV2": (0, 2),
    "ShuffleAndRepeatDataset": (2, None),
    "ShuffleAndRepeatDatasetV2": (2, 5),
    "ShuffleDataset": (2, None),
    "ShuffleDatasetV3": (2, 4),
}
_EACH_ITERATION = ("reshuffle_each_iteration", "rerandomize_each_iteration")
# Positions that no step of a pipeline has, for seeds within one graph.
_GRAPH, _FUNCTION = 10**6, 10**6 + 1
_MAPS = ("MapDataset", "ParallelMapDataset", "ParallelMapDatasetV2", "MapAndBatchDataset")


def derived_seed(seed: int, position: int) -> int:
    """Returns a positive 31-bit seed for the shuffle at a position of a pipeline."""
    return int(np.random.SeedSequence([seed, position]).generate_state(1)[0] >> 1) + 1


def is_nondeterministic(graph: Any, *, random_counts: bool) -> bool:
    """Returns whether an op in a graph may order elements differently on each rank.

    Args:
        graph: `GraphDef`.
        random_counts: bool, whether random numbers drawn in the graph itself decide about elements, as in the
            function of a `filter`.
    """
    if random_counts and draws_unseeded(graph):
        return True
    return any(_nondeterministic_nodes(nodes) for nodes in node_lists(graph)) or bool(_random_decisions(graph))


def draws_unseeded(graph: Any) -> bool:
    """Returns whether an op in a graph, or in a function that it calls, draws unseeded random numbers.

    Args:
        graph: `GraphDef`.
    """
    return _draws_unseeded(graph, graph.node)


def draws(graph: Any) -> bool:
    """Returns whether an op in a graph, or in one of its functions, draws random numbers, seeded or not.

    Args:
        graph: `GraphDef`.
    """
    return any("seed2" in node.attr for nodes in node_lists(graph) for node in nodes)


def make_deterministic(dataset: tf.data.Dataset, seed: int, fixed_seeds: Sequence[int] = ()) -> tf.data.Dataset:
    """Returns a dataset in which unseeded shuffles have a seed, and all ops are deterministic and run in this process.

    Seeded shuffles continue after the orders that rank 0 has made by hand.

    Args:
        dataset: `tf.data.Dataset`.
        seed: int, equal on all ranks.
        fixed_seeds: sequence of int, for each unseeded shuffle, inputs first, its seed if all passes have one order.

    Returns:
        `dataset` itself if its graph is.

    Raises:
        DataError: if the graph cannot be read or made again, or draws random numbers to decide which elements
            are kept or where they go.
        GraphTooLargeError: if it has more than 2 GB.
    """
    try:
        graph = graph_of(dataset)
    except GraphTooLargeError:
        raise
    except Exception as err:  # TensorFlow raises several kinds
        raise refusal(dataset, f"a pipeline whose graph cannot be inspected ({_first_line(err)})") from err
    if names := _random_decisions(graph):
        raise refusal(dataset, f"unseeded random numbers in the function of {', '.join(sorted(names))}")
    found = [[node.op for node in _nondeterministic_nodes(nodes)] for nodes in node_lists(graph)]
    by_name = {node.name: node for node in graph.node}
    reshuffling = [node for node in by_name.values() if _reshuffles(node) and not _is_unseeded(node, by_name)]
    away = other_tasks_nodes(graph)
    if not any(found) and not reshuffling and not away:
        return dataset
    for node in away:
        node.device = ""
    generators = _set_generators(dataset, graph.node, reshuffling)
    # The functions of a graph have no fixed order: they share a seed.
    seeded = _set_seeds(graph.node, derived_seed(seed, _GRAPH), in_function=False, fixed_seeds=fixed_seeds)
    for function in graph.library.function:
        _set_seeds(function.node_def, derived_seed(seed, _FUNCTION), in_function=True)
    inside = sorted({op for ops in found[1:] for op in ops if op in _SEED_INPUTS})
    if inside and not resources_of(dataset).get("was_told"):
        resources_of(dataset)["was_told"] = True
        _log.warning(
            "%s without a seed inside a function of a tf.data pipeline: the same order is used at each call, so that "
            "all ranks agree. Pass `seed=` there to choose it.",
            ", ".join(inside),
        )
    rename_functions(graph, "_kdist")
    try:
        variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
        return from_variant(variant, dataset, *seeded, *generators)
    except Exception as err:
        names = {op for ops in found for op in ops} or {node.op for node in reshuffling}
        raise refusal(dataset, f"{', '.join(sorted(names))} without a seed ({_first_line(err)})") from err


def refusal(dataset: Any, received: str) -> DataError:
    """Returns the error of a pipeline that may have another order on each rank."""
    return DataError(
        f"The tf.data pipeline may have another order on each rank. Received: {received}, in {dataset}. Expected: "
        "one order on all ranks, so that each sample is seen once. Fix: pass a seed, as in `shuffle(..., seed=1)`, or "
        "call `keras.utils.set_random_seed` before the dataset is made; if each rank has data of its own, pass "
        "`auto_shard=False`."
    )


def _first_line(err: Exception) -> str:
    return str(err).strip().partition("\n")[0][:200]


def _nondeterministic_nodes(nodes: Iterable[Any]) -> list[Any]:
    by_name = {node.name: node for node in nodes}
    return [node for node in by_name.values() if _is_sloppy(node) or _is_unseeded(node, by_name)]


def _is_sloppy(node: Any) -> bool:
    # Reading an attribute that is not there would make one.
    if "deterministic" in node.attr:
        return node.attr["deterministic"].s == b"false"
    return "sloppy" in node.attr and node.attr["sloppy"].b


def _is_unseeded(node: Any, by_name: dict[str, Any]) -> bool:
    if node.op not in _SEED_INPUTS:
        return False
    first = _SEED_INPUTS[node.op][0]
    seeds = [by_name.get(name.partition(":")[0]) for name in node.input[first : first + 2]]
    return all(
        seed is not None and seed.op == "Const" and not tf.make_ndarray(seed.attr["value"].tensor).any()
        for seed in seeds
    )


def _reshuffles(node: Any) -> bool:
    if _SEED_INPUTS.get(node.op, (0, None))[1] is None:
        return False
    return any(node.attr[name].b for name in _EACH_ITERATION if name in node.attr)


def _set_generators(dataset: Any, nodes: Any, reshuffling: list[Any]) -> list[Any]:
    """Replaces the seed generators of seeded shuffles; returns the datasets that hold the new ones."""
    by_name = {node.name: node for node in nodes}
    kept = resources_of(dataset).setdefault(GENERATORS_BY_NODE, {})
    first_uses: dict[Any, str] = {}  # a dataset that is used twice has two nodes, which take turns at one generator
    for node in reshuffling:
        first, position = _SEED_INPUTS[node.op]
        handles = [each.name for each in by_name[node.input[position]].attr["value"].tensor.resource_handle_val]
        name = first_uses.setdefault(handles[0] if handles else node.name, node.name)
        if name not in kept:
            seeds = [tf.make_ndarray(by_name[each].attr["value"].tensor) for each in node.input[first : first + 2]]
            kept[name] = shuffle_with((seeds[0], seeds[1]), tf.data.Dataset.range(1), 1, reshuffle=True)
        _replace_input(nodes, node, position, _seed_nodes(kept[name])[2])
    skip_orders_by_node(dataset)
    return list(kept.values())


def skip_orders_by_node(dataset: Any) -> None:
    """Lets the shuffles of a graph that was made again leave out the orders that rank 0 has made by hand.

    Args:
        dataset: `tf.data.Dataset`, the user's. Nothing is done if its graph was not made again.
    """
    generators = resources_of(dataset).get(GENERATORS_BY_NODE, {})
    counts = [resources_of(each).get(SKIPPED, 0) for each in seeded_shuffles(dataset)] if generators else []
    if len(counts) != len(generators):  # others are in the graph than in Python
        counts = [max(counts, default=0)] * len(generators)
    skipped = resources_of(dataset).setdefault(SKIPPED_BY_NODE, {})
    for (name, generator), count in zip(generators.items(), counts, strict=True):
        skip_orders(generator, count - skipped.get(name, 0))
        skipped[name] = count


def shuffle_with(
    seeds: tuple[Any, Any], dataset: Any, buffer_size: Any, *, reshuffle: bool, generator: Any = None, owner: Any = None
) -> tf.data.Dataset:
    """Returns a shuffled dataset with two seeds exactly as given, which `tf.data` would derive from the global seed.

    Args:
        seeds: tuple of two ints or `int64` scalars.
        dataset: `tf.data.Dataset`.
        buffer_size: int or `int64` scalar.
        reshuffle: bool, whether each iteration has another order.
        generator: resource that makes the seeds of the iterations; `None` for a new one.
        owner: object that keeps the generator.
    """
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=buffer_size,
        seed=seeds[0],
        seed2=seeds[1],
        seed_generator=tf.raw_ops.DummySeedGenerator() if generator is None else generator,
        reshuffle_each_iteration=reshuffle,
        **flat_structure(dataset),
    )
    return from_variant(variant, dataset, owner)


def skip_orders(shuffled: tf.data.Dataset, count: int) -> None:
    """Makes orders of a shuffle that nobody uses.

    Args:
        shuffled: `tf.data.Dataset`, of `shuffle_with`.
        count: int, how many.
    """
    for _ in range(count):
        iter(shuffled)


def _replace_input(nodes: Any, node: Any, position: Any, source: Any, *, in_function: bool = False) -> None:
    """Adds a copy of a node, which becomes an input of another node."""
    copy = nodes.add()
    copy.CopyFrom(source)
    copy.name = f"{node.name}/kdist_input{position}"
    output = "handle" if copy.op == "DummySeedGenerator" else "output"
    node.input[position] = f"{copy.name}:{output}:0" if in_function else copy.name


def _set_seeds(nodes: Any, seed: int, *, in_function: bool, fixed_seeds: Sequence[int] = ()) -> list[Any]:
    """Makes the nodes of a graph or function deterministic in place; returns the datasets that hold their seeds."""
    holders = []
    found = _nondeterministic_nodes(nodes)
    shuffles = [] if in_function else [node.name for node in found if node.op in _SEED_INPUTS and "Shuffle" in node.op]
    # Where the graph has other shuffles than the Python objects, they are told apart by their position.
    if len(fixed_seeds) != len(shuffles):
        fixed_seeds = [derived_seed(1, position) for position in range(len(shuffles))]
    fixed, cached = dict(zip(shuffles, fixed_seeds, strict=True)), _inputs_of_caches(nodes)
    for count, node in enumerate(found):
        if "deterministic" in node.attr:
            node.attr["deterministic"].s = b"true"
        if "sloppy" in node.attr:
            node.attr["sloppy"].b = False
        if node.op not in _SEED_INPUTS:
            continue
        first, generator = _SEED_INPUTS[node.op]
        reshuffle = "reshuffle_each_iteration" not in node.attr or node.attr["reshuffle_each_iteration"].b
        if node.name in fixed and (not reshuffle or node.name in cached):
            holder = shuffle_with((fixed[node.name], 0), tf.data.Dataset.range(1), 1, reshuffle=reshuffle)
        else:
            holder = shuffle_with((seed + count, 0), tf.data.Dataset.range(1), 1, reshuffle=reshuffle)
        sources = _seed_nodes(holder)
        positions = [first, first + 1] if generator is None else [first, first + 1, generator]
        if in_function:
            # A function cannot hold a generator: each call makes one.
            sources[2] = tf.compat.v1.NodeDef(op="DummySeedGenerator")
        else:
            holders.append(holder)
        for position, source in zip(positions, sources, strict=False):
            _replace_input(nodes, node, position, source, in_function=in_function)
    return holders


def _inputs_of_caches(nodes: Any) -> set[str]:
    """Returns the names of the nodes whose elements are cached: all passes have the order of the first."""
    by_name = {node.name: node for node in nodes}
    pending = [name for node in nodes if node.op.startswith("CacheDataset") for name in node.input]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name in by_name and name not in found:
            found.add(name)
            pending.extend(by_name[name].input)
    return found


def _seed_nodes(shuffled: tf.data.Dataset) -> list[Any]:
    """Returns the nodes of a shuffle's two seeds and of its generator, which lives as long as the shuffle.

    The generator makes another order at each iteration. A new one in the graph would start again whenever
    `tf.data` optimizes the graph, which is at each iteration.
    """
    nodes = {node.name: node for node in graph_of(shuffled).node}
    (shuffle,) = (node for node in nodes.values() if node.op == "ShuffleDatasetV3")
    return [nodes[name] for name in shuffle.input[2:5]]


def _random_decisions(graph: Any) -> set[str]:
    """Returns the kinds of datasets whose function draws unseeded random numbers to decide about elements."""
    library = {function.signature.name: function.node_def for function in graph.library.function}
    kinds = set()
    for nodes in node_lists(graph):
        for node, name in called_functions(nodes):
            is_dataset = re.search(r"Dataset(V\d+)?$", node.op) and node.op not in _MAPS
            if is_dataset and name in library and _draws_unseeded(graph, library[name]):
                kinds.add(node.op)
    return kinds


def _draws_unseeded(graph: Any, nodes: Iterable[Any]) -> bool:
    library = {function.signature.name: function.node_def for function in graph.library.function}
    pending, seen = [nodes], set()
    while pending:
        for node, name in called_functions(pending.pop()):
            if "seed" in node.attr and "seed2" in node.attr and node.attr["seed"].i == node.attr["seed2"].i == 0:
                return True
            if node.op not in _MAPS and name in library and name not in seen:
                seen.add(name)
                pending.append(library[name])
    return False
