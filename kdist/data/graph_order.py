"""Order in the graph of a `tf.data` pipeline: unseeded shuffles get a seed, sloppy steps become deterministic.

`tf.data` shuffles on each rank for itself when no seed was set: a sample is then seen twice, another never. So it is
where one was set, if one rank alone has looked into the dataset: its shuffle is at a later order. Shuffles that
reshuffle therefore get a generator of kdist's own, which stays with the user's dataset and begins with the first order.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.errors import DataError

_log = logging.getLogger("kdist")

# Where the two seeds stand among the inputs of a dataset's node, and where its seed generator does.
_SEED_INPUTS: dict[str, tuple[int, int | None]] = {
    "RandomDataset": (0, None),
    "RandomDatasetV2": (0, 2),
    "ShuffleAndRepeatDataset": (2, None),
    "ShuffleAndRepeatDatasetV2": (2, 5),
    "ShuffleDataset": (2, None),
    "ShuffleDatasetV3": (2, 4),
}
_EACH_ITERATION = ("reshuffle_each_iteration", "rerandomize_each_iteration")
# Places that no step of a pipeline has, for seeds within one closed graph.
_GRAPH, _FUNCTION = 10**6, 10**6 + 1
_MAPS = ("MapDataset", "ParallelMapDataset", "ParallelMapDatasetV2", "MapAndBatchDataset")


def derived_seed(seed: int, place: int) -> int:
    """Returns a positive 31-bit seed for the shuffle at some place of a pipeline."""
    return int(np.random.SeedSequence([seed, place]).generate_state(1)[0] >> 1) + 1


def from_variant(variant: Any, like: tf.data.Dataset, keep: Any = None) -> tf.data.Dataset:
    """Returns a dataset made of a variant tensor.

    Args:
        variant: scalar variant tensor that holds a dataset.
        like: the user's dataset with the same elements, kept alive: its Python functions may be called.
        keep: anything else to keep alive.
    """
    dataset = tf.data.experimental.from_variant(variant, like.element_spec)
    dataset._kdist_made_of = (like, keep)
    return dataset


def is_disorderly(graph: Any, *, random_counts: bool) -> bool:
    """Whether something in a graph orders elements differently on each rank.

    Args:
        graph: `GraphDef`.
        random_counts: bool, whether random numbers drawn in the graph itself decide about elements, as in the
            function of a `filter`.
    """
    if random_counts and _unseeded_random(graph, graph.node):
        return True
    return any(_defects(nodes) for nodes in node_lists(graph)) or bool(_random_decisions(graph))


def rewritten(dataset: tf.data.Dataset, seed: int, lasting: Sequence[int] = ()) -> tf.data.Dataset:
    """Returns a dataset in which unseeded shuffles have a seed and all steps are deterministic.

    Seeded shuffles begin with their first order, whatever has iterated them.

    Args:
        dataset: `tf.data.Dataset`.
        seed: int, equal on all ranks.
        lasting: sequence of int, for each unseeded shuffle, inputs first, the seed that it gets if its order lasts.

    Returns:
        `dataset` itself if its graph follows one order already.

    Raises:
        DataError: if the graph cannot be read or made anew, or draws random numbers to decide which elements
            are kept or where they go.
    """
    try:
        graph = _graph(dataset)
    except Exception as err:  # TensorFlow raises several kinds: too large, not serializable, ...
        raise _refusal(dataset, f"a pipeline whose graph cannot be inspected ({_first_line(err)})") from err
    if names := _random_decisions(graph):
        raise _refusal(dataset, f"unseeded random numbers in the function of {', '.join(sorted(names))}")
    found = [[node.op for node in _defects(nodes)] for nodes in node_lists(graph)]
    by_name = {node.name: node for node in graph.node}
    reshuffling = [node for node in by_name.values() if _reshuffles(node) and not _is_unseeded(node, by_name)]
    if not any(found) and not reshuffling:
        return dataset
    generators = _own_generators(dataset, graph.node, reshuffling)
    # Functions come in no certain order: they share a seed.
    donors = _repair(graph.node, derived_seed(seed, _GRAPH), function=False, lasting=lasting)
    for function in graph.library.function:
        _repair(function.node_def, derived_seed(seed, _FUNCTION), function=True)
    if inside := sorted({op for ops in found[1:] for op in ops if op in _SEED_INPUTS}):
        _log.warning(
            "%s without a seed inside a function of a tf.data pipeline: the same order is used at each call, so that "
            "all ranks agree. Pass `seed=` there to choose it.",
            ", ".join(inside),
        )
    rename_functions(graph, "_kdist")
    try:
        return from_variant(
            tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString()), dataset, donors + generators
        )
    except Exception as err:
        names = {op for ops in found for op in ops} or {node.op for node in reshuffling}
        raise _refusal(dataset, f"{', '.join(sorted(names))} without a seed ({_first_line(err)})") from err


def _refusal(dataset: Any, received: str) -> DataError:
    return DataError(
        f"A tf.data pipeline that may yield another order on each rank. Received: {received}, in {dataset}. Expected: "
        "one order on all ranks, so that each sample is seen once. Fix: pass a seed, as in `shuffle(..., seed=1)`, or "
        "call `keras.utils.set_random_seed` before the dataset is made; if each rank has data of its own, pass "
        "`auto_shard=False`."
    )


def _first_line(err: Exception) -> str:
    return str(err).strip().partition("\n")[0][:200]


def node_lists(graph: Any) -> Iterator[Any]:
    """Yields the nodes of a graph, and those of each of its functions."""
    yield graph.node
    for function in graph.library.function:
        yield function.node_def


def _defects(nodes: Iterable[Any]) -> list[Any]:
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


def _own_generators(dataset: Any, nodes: Any, reshuffling: list[Any]) -> list[Any]:
    """Gives seeded shuffles generators of their own, kept with the user's dataset: a second `fit` goes on with them."""
    by_name = {node.name: node for node in nodes}
    kept = dataset.__dict__.setdefault("_kdist_generators", {})
    for node in reshuffling:
        first, place = _SEED_INPUTS[node.op]
        if node.name not in kept:
            seeds = [tf.make_ndarray(by_name[name].attr["value"].tensor) for name in node.input[first : first + 2]]
            kept[node.name] = _one_row_shuffled(*seeds)
        _connect(nodes, node, place, _nodes_of_seeds(kept[node.name])[2])
    return list(kept.values())


def _one_row_shuffled(seed: Any, seed2: Any, *, reshuffle: bool = True) -> tf.data.Dataset:
    row = tf.data.Dataset.range(1)
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(row),
        buffer_size=1,
        seed=seed,
        seed2=seed2,
        seed_generator=tf.raw_ops.DummySeedGenerator(),
        reshuffle_each_iteration=reshuffle,
        output_types=[tf.int64],
        output_shapes=[tf.TensorShape([])],
    )
    return from_variant(variant, row)


def _connect(nodes: Any, node: Any, place: Any, source: Any, *, function: bool = False) -> None:
    """Adds a copy of a node, and makes it an input of another."""
    copy = nodes.add()
    copy.CopyFrom(source)
    copy.name = f"{node.name}/kdist_input{place}"
    output = "handle" if copy.op == "DummySeedGenerator" else "output"
    node.input[place] = f"{copy.name}:{output}:0" if function else copy.name


def _repair(nodes: Any, seed: int, *, function: bool, lasting: Sequence[int] = ()) -> list[Any]:
    """Repairs the nodes of a graph or function in place and returns what must be kept alive with them."""
    donors = []
    defects = _defects(nodes)
    shuffles = [] if function else [node.name for node in defects if node.op in _SEED_INPUTS and "Shuffle" in node.op]
    # What the graph has more or less of than Python knows is told apart by its place.
    lasting = lasting if len(lasting) == len(shuffles) else [derived_seed(1, place) for place in range(len(shuffles))]
    seed_of, cached = dict(zip(shuffles, lasting, strict=True)), _before_a_cache(nodes)
    for count, node in enumerate(defects):
        if "deterministic" in node.attr:
            node.attr["deterministic"].s = b"true"
        if "sloppy" in node.attr:
            node.attr["sloppy"].b = False
        if node.op not in _SEED_INPUTS:
            continue
        first, generator = _SEED_INPUTS[node.op]
        reshuffle = "reshuffle_each_iteration" not in node.attr or node.attr["reshuffle_each_iteration"].b
        if node.name in seed_of and (not reshuffle or node.name in cached):
            donor = _one_row_shuffled(seed_of[node.name], 0, reshuffle=reshuffle)
        else:
            donor = tf.data.Dataset.range(1).shuffle(1, seed + count, reshuffle)
        given = _nodes_of_seeds(donor)
        places = [first, first + 1] if generator is None else [first, first + 1, generator]
        if function:
            # A function cannot hold on to a generator: each call makes its own.
            given[2] = tf.compat.v1.NodeDef(op="DummySeedGenerator")
        else:
            donors.append(donor)
        for place, source in zip(places, given, strict=False):
            _connect(nodes, node, place, source, function=function)
    return donors


def _before_a_cache(nodes: Any) -> set[str]:
    """Returns the names of the nodes whose elements are cached: all passes see the order of the first."""
    by_name = {node.name: node for node in nodes}
    pending = [name for node in nodes if node.op.startswith("CacheDataset") for name in node.input]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name in by_name and name not in found:
            found.add(name)
            pending.extend(by_name[name].input)
    return found


def _nodes_of_seeds(shuffled: tf.data.Dataset) -> list[Any]:
    """Returns the nodes that give a shuffle its two seeds and its generator, which lives as long as it does.

    The generator makes each iteration another order. A new one in the graph would start anew whenever
    `tf.data` optimizes the graph, which is at each iteration.
    """
    nodes = {node.name: node for node in _graph(shuffled).node}
    (shuffle,) = (node for node in nodes.values() if node.op == "ShuffleDatasetV3")
    return [nodes[name] for name in shuffle.input[2:5]]


def _graph(dataset: tf.data.Dataset) -> Any:
    variant = tf.data.experimental.to_variant(dataset)
    serialized = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=1)
    return tf.compat.v1.GraphDef.FromString(serialized.numpy())


def rename_functions(graph: Any, suffix: str) -> None:
    """Renames all functions of a graph: the runtime refuses another body under a name that it knows."""
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
            for function in _function_attrs(node):
                function.name = renamed(function.name)


def _function_attrs(node: Any) -> Iterator[Any]:
    for attr in node.attr.values():
        if attr.WhichOneof("value") == "func":
            yield attr.func
        elif attr.WhichOneof("value") == "list":
            yield from attr.list.func


def _called(nodes: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    for node in nodes:
        yield node, node.op
        yield from ((node, function.name) for function in _function_attrs(node))


def _random_decisions(graph: Any) -> set[str]:
    """Returns the kinds of steps whose function draws unseeded random numbers to decide about elements."""
    library = {function.signature.name: function.node_def for function in graph.library.function}
    kinds = set()
    for nodes in node_lists(graph):
        for node, name in _called(nodes):
            is_dataset = re.search(r"Dataset(V\d+)?$", node.op) and node.op not in _MAPS
            if is_dataset and name in library and _unseeded_random(graph, library[name]):
                kinds.add(node.op)
    return kinds


def _unseeded_random(graph: Any, nodes: Iterable[Any]) -> bool:
    library = {function.signature.name: function.node_def for function in graph.library.function}
    pending, seen = [nodes], set()
    while pending:
        for node, name in _called(pending.pop()):
            if "seed" in node.attr and "seed2" in node.attr and node.attr["seed"].i == node.attr["seed2"].i == 0:
                return True
            if node.op not in _MAPS and name in library and name not in seen:
                seen.add(name)
                pending.append(library[name])
    return False
