"""A user's `tf.data` pipeline, known step by step from its end, so that it can be made to follow one order.

The attributes read here are not TensorFlow's public ones. Whatever is missing or unknown ends the taking
apart: what remains before it is one closed dataset, inspected as a graph.
"""

from __future__ import annotations

import collections
import logging
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kdist.data import graph_order
from kdist.data.own_draws import with_own_draws
from kdist.errors import DataError

_log = logging.getLogger("kdist")

# Kinds of datasets that keep the order of their inputs as far as their functions are orderly.
_ORDERLY = {
    "CacheDataset",
    "TextLineDatasetV2",
    "_ConcatenateDataset",
    "_FilterDataset",
    "_FlatMapDataset",
    "_GeneratorDataset",
    "_PaddedBatchDataset",
    "_RangeDataset",
    "_TensorDataset",
    "_TensorSliceDataset",
    "_UnbatchDataset",
    "_WindowDataset",
    "_ZipDataset",
}


class Pipeline:
    """A pipeline that yields the same order on all ranks.

    Shuffles without a seed get one and parallel steps become deterministic. Where the user's dataset yields a new
    order at each iteration, so does this one; an order that stays (`reshuffle_each_iteration=False`, a cache) is the
    same in all that is made of the shuffle, a part for training and one for validation. A seeded shuffle yields the
    orders that it would in one process, the first one first, for iterations of the user's do not count. Known steps at
    the end are made anew one by one; what lies before them is rewritten as a graph, and only where it must be.

    Args:
        dataset: the user's `tf.data.Dataset`.
        seed: int, equal on all ranks.

    Attributes:
        steps: tuple of the user's dataset objects, each known by its last operation, in the order of the data.

    Raises:
        DataError: if something in it cannot be made to follow one order.
    """

    def __init__(self, dataset: tf.data.Dataset, seed: int):
        self._lasting = dict(_lasting_seeds(dataset))
        steps: list[Any] = []
        while _is_known(dataset) and not _has_disorderly_function(dataset):
            steps.insert(0, dataset)
            dataset = dataset._input_dataset
        self.steps = tuple(steps)
        self._seed = seed
        self._base = _with_one_order(dataset, seed)
        changed = [self._base is not dataset, *(_is_disorderly_step(step) or _reshuffles(step) for step in steps)]
        self._unchanged = changed.index(True) if True in changed else len(changed)

    def dataset(self, num_steps: int | None = None) -> tf.data.Dataset:
        """Returns the pipeline as one dataset.

        Args:
            num_steps: int or `None`, how many of `steps` to apply, counted from the first; `None` for all.
        """
        if num_steps is None:
            num_steps = len(self.steps)
        if num_steps == 0:
            return self._base
        step = self.steps[num_steps - 1]
        if num_steps < self._unchanged:
            return step
        lasts = type(step).__name__ == "_ShuffleDataset" and not _reshuffles(step)
        seed = self._lasting.get(id(step), 0) if lasts else graph_order.derived_seed(self._seed, num_steps)
        return _REPLAYS[type(step).__name__](step, self.dataset(num_steps - 1), seed)


def carries_along(step: Any) -> bool:
    """Whether `beside` can apply a step: one element in, one element out, of dense tensors."""
    if type(step).__name__ in ("_PrefetchDataset", "_OptionsDataset"):
        return True
    if type(step).__name__ not in ("_MapDataset", "_ParallelMapDataset"):
        return False
    specs = tf.nest.flatten((step._input_dataset.element_spec, step.element_spec))
    return all(isinstance(spec, tf.TensorSpec) for spec in specs)


def beside(step: Any, dataset: tf.data.Dataset, rank: int) -> tf.data.Dataset:
    """Applies a step to the first component of a dataset's elements; the others are carried along.

    Args:
        step: one of `Pipeline.steps` that `carries_along`.
        dataset: dataset of tuples, the first component a structure that the step takes.
        rank: int, whose samples these are: what the step draws at random is its own.

    Returns:
        A dataset of tuples with the first component replaced.
    """
    kind = type(step).__name__
    if kind == "_PrefetchDataset":
        return dataset.prefetch(int(step._buffer_size))
    if kind == "_OptionsDataset":
        return dataset.with_options(step.options())
    # The traced function, not the user's Python function: what that closes over may have changed.
    function = with_own_draws(step._map_func.function, step, rank)

    def apply(element: Any, *others: Any) -> Any:
        outputs = tf.nest.flatten(function(*tf.nest.flatten(element)))
        return (tf.nest.pack_sequence_as(step.element_spec, outputs), *others)

    if kind == "_ParallelMapDataset":
        return dataset.map(apply, num_parallel_calls=step._num_parallel_calls, deterministic=True)
    return dataset.map(apply)


def _replay_map(step: Any, dataset: Any, seed: int) -> Any:
    del seed
    arguments = {
        "input_dataset": tf.data.experimental.to_variant(dataset),
        "other_arguments": step._map_func.function.captured_inputs,
        "f": step._map_func.function,
        "preserve_cardinality": True,
        **step._flat_structure,
    }
    if type(step).__name__ == "_ParallelMapDataset":
        calls = step._num_parallel_calls
        variant = tf.raw_ops.ParallelMapDatasetV2(num_parallel_calls=calls, deterministic="true", **arguments)
    else:
        variant = tf.raw_ops.MapDataset(**arguments)
    return graph_order.from_variant(variant, step)


def _replay_batch(step: Any, dataset: Any, seed: int) -> Any:
    del seed
    calls = getattr(step, "_num_parallel_calls", None)
    deterministic = None if calls is None else True
    return dataset.batch(int(step._batch_size), bool(step._drop_remainder), calls, deterministic)


def _replay_shuffle(step: Any, dataset: Any, seed: int) -> Any:
    seeds = step._seed, step._seed2
    if _is_disorderly_step(step):
        if _reshuffles(step):
            return dataset.shuffle(step._buffer_size, seed, step._reshuffle_each_iteration)
        seeds = seed, 0
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=step._buffer_size,
        seed=seeds[0],
        seed2=seeds[1],
        seed_generator=_generator(step) if _reshuffles(step) else tf.raw_ops.DummySeedGenerator(),
        reshuffle_each_iteration=_reshuffles(step),
        **step._flat_structure,
    )
    return graph_order.from_variant(variant, step)


def _generator(step: Any) -> Any:
    """Returns the generator of a seeded shuffle's orders in all passes that kdist makes.

    It stays with the user's dataset, so that a second `fit` goes on.
    """
    if not hasattr(step, "_kdist_generator"):
        step._kdist_generator = tf.raw_ops.AnonymousSeedGenerator(seed=step._seed, seed2=step._seed2, reshuffle=True)
    return step._kdist_generator.handle


_REPLAYS: dict[str, Callable[[Any, Any, int], Any]] = {
    "_BatchDataset": _replay_batch,
    "_MapDataset": _replay_map,
    "_OptionsDataset": lambda step, dataset, _: dataset.with_options(step.options()),
    "_ParallelBatchDataset": _replay_batch,
    "_ParallelMapDataset": _replay_map,
    "_PrefetchDataset": lambda step, dataset, _: dataset.prefetch(int(step._buffer_size)),
    "_RepeatDataset": lambda step, dataset, _: dataset.repeat(step._count),
    "_ShuffleDataset": _replay_shuffle,
    "_SkipDataset": lambda step, dataset, _: dataset.skip(step._count),
    "_TakeDataset": lambda step, dataset, _: dataset.take(step._count),
}


# What is read of each kind; a TensorFlow that names it otherwise makes the kind unknown.
_ATTRIBUTES = {
    "_BatchDataset": ("_batch_size", "_drop_remainder"),
    "_MapDataset": ("_map_func", "_flat_structure"),
    "_OptionsDataset": (),
    "_ParallelBatchDataset": ("_batch_size", "_drop_remainder", "_num_parallel_calls", "_deterministic"),
    "_ParallelMapDataset": ("_map_func", "_flat_structure", "_num_parallel_calls", "_deterministic"),
    "_PrefetchDataset": ("_buffer_size",),
    "_RepeatDataset": ("_count",),
    "_ShuffleDataset": ("_buffer_size", "_seed", "_seed2", "_reshuffle_each_iteration", "_flat_structure"),
    "_SkipDataset": ("_count",),
    "_TakeDataset": ("_count",),
}


def _is_known(dataset: Any) -> bool:
    names = _ATTRIBUTES.get(type(dataset).__name__)
    return names is not None and all(hasattr(dataset, name) for name in ("_input_dataset", *names))


def _is_disorderly_step(dataset: Any) -> bool:
    if type(dataset).__name__ == "_ShuffleDataset":
        return int(dataset._seed) == int(dataset._seed2) == 0
    return getattr(dataset, "_deterministic", "default") == "false"


def _reshuffles(dataset: Any) -> bool:
    return type(dataset).__name__ == "_ShuffleDataset" and dataset._reshuffle_each_iteration is not False


def _has_disorderly_function(dataset: Any) -> bool:
    keeps_order = "Map" in type(dataset).__name__ and "Flat" not in type(dataset).__name__
    return any(
        graph_order.is_disorderly(function.function.graph.as_graph_def(), random_counts=not keeps_order)
        for function in dataset._functions()
    )


def _with_one_order(dataset: Any, seed: int) -> Any:
    if not _is_orderly(dataset):
        return graph_order.rewritten(dataset, seed, [lasting for _, lasting in _lasting_seeds(dataset)])
    if not any(_reshuffles(each) for each in with_inputs(dataset)):
        return dataset
    try:
        return graph_order.rewritten(dataset, seed)
    except DataError:  # a graph too large, or of a kind that cannot be made anew
        _log.warning(
            "A seeded shuffle inside of %s has the same order on all ranks only as long as none of them alone iterates "
            "the dataset: look into another one, made in the same way, or shuffle later in the pipeline.",
            dataset,
        )
        return dataset


def _lasting_seeds(dataset: Any) -> list[tuple[int, int]]:
    """Returns the id of each shuffle without a seed, inputs first, with a seed for it if its order lasts.

    All that is made of such a shuffle must be in one order, whichever verb it is given to and whatever it is joined
    with there: a part for training and one for validation would overlap. So the seed follows from what is shuffled.
    """
    found: dict[int, int] = {}
    visits, num_alike = [], collections.Counter[str]()
    for each in _inputs_first(dataset):
        if type(each).__name__ == "_ShuffleDataset" and _is_disorderly_step(each):
            if id(each) not in found:
                kind = " ".join(_look(part) for part in with_inputs(each))
                found[id(each)] = graph_order.derived_seed(zlib.crc32(kind.encode()), num_alike[kind])
                num_alike[kind] += 1
            visits.append((id(each), found[id(each)]))
    return visits


def _look(dataset: Any) -> str:
    bounds = [str(getattr(dataset, name, "")) for name in ("_start", "_stop", "_step")]
    lengths = [str(leaf.shape) for leaf in getattr(dataset, "_tensors", ()) if hasattr(leaf, "shape")]
    return " ".join([type(dataset).__name__, str(dataset.element_spec), *bounds, *lengths])


def _inputs_first(dataset: Any) -> Iterator[Any]:
    for each in dataset._inputs():
        yield from _inputs_first(each)
    yield dataset


def files_to_write(dataset: Any) -> list[str]:
    """Returns the files in which a pipeline caches what it yields, and that are not there yet, or not whole."""
    caches = [each for each in with_inputs(dataset) if type(each).__name__ == "CacheDataset"]
    names = [tf.convert_to_tensor(getattr(each, "_filename", "")).numpy().decode() for each in caches]
    return [name for name in names if name and not tf.io.gfile.exists(f"{name}.index")]


def shards_by_hand(dataset: Any) -> list[list[int]]:
    """Returns the two numbers of each `shard` in a pipeline; none where its policy leaves it alone."""
    options = dataset.options().experimental_distribute
    if options.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF:
        return []
    found = [each for each in with_inputs(dataset) if type(each).__name__ == "_ShardDataset"]
    return [[int(each._num_shards), int(each._index)] for each in found if hasattr(each, "_index")]


def _is_orderly(dataset: Any) -> bool:
    """Whether a dataset is known to follow one order without a look at its graph, which may be large."""
    return all(
        (type(each).__name__ in _ORDERLY or _is_known(each))
        and not _is_disorderly_step(each)
        and not _has_disorderly_function(each)
        for each in with_inputs(dataset)
    )


def with_inputs(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and those that it is made of, from the end to the beginning."""
    yield dataset
    for each in dataset._inputs():
        yield from with_inputs(each)


def calls_python(dataset: Any) -> bool:
    """Whether Python functions of the user's make a dataset's elements; `False` where it cannot be taken apart."""
    python = {"GeneratorDataset", "PyFunc", "EagerPyFunc"}
    try:
        graphs = (f.function.graph.as_graph_def() for each in with_inputs(dataset) for f in each._functions())
        return any(
            node.op in python
            for graph in graphs
            for nodes in (graph.node, *(function.node_def for function in graph.library.function))
            for node in nodes
        )
    except (AttributeError, TypeError):
        return False
