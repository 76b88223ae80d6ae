"""A user's `tf.data` pipeline, split into the operations at its end, so that it has one order on all ranks.

Whatever is unknown ends the splitting: what comes before is one dataset, inspected as a graph.
"""

from __future__ import annotations

import collections
import logging
import zlib
from typing import Any

import tensorflow as tf

from kdist.data.graphs import dataset_internals as internals
from kdist.data.graphs.captures import random_states
from kdist.data.graphs.dataset_internals import (
    DECIDING,
    attributes,
    functions,
    inputs_first,
    is_nondeterministic_op,
    kind,
    reshuffles,
    with_inputs,
)
from kdist.data.graphs.graph_def import GraphTooLargeError, graph_of, is_of_other_task, other_tasks_nodes, own_task
from kdist.data.graphs.inspection import is_stateless
from kdist.data.pipelines.determinism import (
    derived_seed,
    draws,
    draws_unseeded,
    is_nondeterministic,
    make_deterministic,
    refusal,
)
from kdist.data.pipelines.random_ops import with_rank_seeds
from kdist.data.pipelines.replay import can_be_replayed, replay
from kdist.errors import DataError

APPLIED = "applied"
"""The key in `resources_of` of the position of the step that `Pipeline.apply` has applied last, and what to."""

_log = logging.getLogger("kdist")


class Pipeline:
    """A pipeline that has the same order on all ranks.

    Shuffles without a seed get one and parallel ops become deterministic. Where the user's dataset has a new order at
    each iteration, so has this one. An order that is the same in all iterations (`reshuffle_each_iteration=False`, a
    cache) is the same in all datasets made of the shuffle, a training part and a validation part. A seeded shuffle has
    the orders that it would have in one process, after those that rank 0 has made by hand. Known
    operations at the end are made again one by one; the graph before them is rewritten only where it must be.

    Args:
        dataset: the user's `tf.data.Dataset`.
        seed: int, equal on all ranks.

    Attributes:
        options: `tf.data.Options`, the user's.
        steps: tuple of the user's dataset objects, each known by its last operation, in the order of the data.
        is_base_rewritten: bool, whether the graph before them was rewritten.

    Raises:
        DataError: if something in it cannot be made deterministic.
    """

    def __init__(self, dataset: tf.data.Dataset, seed: int):
        _refuse_service(dataset)
        _warn_of_random_decisions(dataset)
        self.options = dataset.options()
        self._fixed_seeds = dict(_fixed_seeds(dataset))
        steps: list[Any] = []
        while _is_replayable(dataset) and not _has_nondeterministic_function(dataset):
            steps.insert(0, dataset)
            (dataset,) = internals.inputs(dataset)
        self.steps = tuple(steps)
        # Seeds are counted from the last cache on.
        self._num_cached = max((number for number, step in enumerate(steps, 1) if kind(step) == "Cache"), default=0)
        self._seed = seed
        self._base = _deterministic_base(dataset, seed)
        self.is_base_rewritten = self._base is not dataset
        changed = [self.is_base_rewritten, *(is_nondeterministic_op(step) or reshuffles(step) for step in steps)]
        self._unchanged = changed.index(True) if True in changed else len(changed)

    @property
    def depends_on_seed(self) -> bool:
        """Whether `seed` decides about the order: not where nothing is shuffled, or all with the user's seeds."""
        return self.is_base_rewritten or any(is_nondeterministic_op(step) for step in self.steps)

    def dataset(self, num_steps: int | None = None) -> tf.data.Dataset:
        """Returns the pipeline as one dataset.

        Args:
            num_steps: int or `None`, how many of `steps` to apply, counted from the first; `None` for all.
        """
        if num_steps is None:
            num_steps = len(self.steps)
        if num_steps == 0:
            return self._base
        if num_steps < self._unchanged:
            return self.steps[num_steps - 1]
        return self.apply(num_steps - 1, self.dataset(num_steps - 1))

    def apply(self, position: int, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Applies one of `steps` to another dataset; a shuffle orders it as it does the pipeline's own elements."""
        step = self.steps[position]
        is_fixed = kind(step) == "Shuffle" and not reshuffles(step)
        seed = (
            self._fixed_seeds.get(id(step), 0)
            if is_fixed
            else derived_seed(self._seed, position + 1 - self._num_cached)
        )
        applied = replay(step, dataset, seed)
        internals.resources_of(applied)[APPLIED] = position, dataset
        return applied


def is_elementwise(step: Any) -> bool:
    """Returns whether `apply_to_first` can apply a step: one element in, one element out, of dense tensors."""
    if kind(step) in ("Prefetch", "Options"):
        return True
    if kind(step) not in ("Map", "ParallelMap"):
        return False
    specs = tf.nest.flatten(([each.element_spec for each in internals.inputs(step)], step.element_spec))
    return all(isinstance(spec, tf.TensorSpec) for spec in specs)


def apply_to_first(step: Any, dataset: tf.data.Dataset, rank: int, *, parallel: bool = False) -> tf.data.Dataset:
    """Applies a step to the first component of a dataset's elements; the others pass through.

    Args:
        step: one of `Pipeline.steps` that `is_elementwise`.
        dataset: dataset of tuples, the first component a structure that the step takes.
        rank: int, whose samples these are: random ops in the step draw numbers of this rank.
        parallel: bool, whether a map that was not asked to runs in parallel, if it only computes from its argument. As
            many calls run as TensorFlow begins with; its optimizer makes such maps parallel only for its tuner.

    Returns:
        A dataset of tuples with the first component replaced.
    """
    if kind(step) in ("Prefetch", "Options"):
        return replay(step, dataset)
    # The traced function, not the user's Python function: what that closes over may have changed.
    function = with_rank_seeds(functions(step)[0], step, rank)

    def apply(element: Any, *others: Any) -> Any:
        outputs = tf.nest.flatten(function(*tf.nest.flatten(element)))
        return (tf.nest.pack_sequence_as(step.element_spec, outputs), *others)

    calls = getattr(attributes(step), "num_parallel_calls", None)
    if calls is None and parallel and is_stateless(step):
        calls = tf.data.AUTOTUNE
    return dataset.map(apply, calls, deterministic=None if calls is None else True)


def is_bound_to_other_task(dataset: Any) -> bool:
    """Returns whether a pipeline, or a Python function in it, is bound to the name of the host before its cluster."""
    return is_of_other_task(dataset) or any(_calls_away(each) for each in with_inputs(dataset))


def _calls_away(dataset: Any) -> bool:
    graphs = (function.graph.as_graph_def() for function in functions(dataset))
    return bool(own_task()) and any(other_tasks_nodes(graph) for graph in graphs)


def _is_replayable(dataset: Any) -> bool:
    if not can_be_replayed(dataset) or _calls_away(dataset):
        return False
    return kind(dataset) != "Cache" or _keeps_one_order(dataset)


def _keeps_one_order(cache: Any) -> bool:
    """Returns whether a cache only saves work: what it holds is in memory, and has the same order without it."""
    shuffles = any(kind(each) == "Shuffle" for each in with_inputs(cache))
    in_memory = tf.convert_to_tensor(attributes(cache).filename).numpy() == b""
    return in_memory and not shuffles and _is_deterministic(cache)


def _has_nondeterministic_function(dataset: Any) -> bool:
    keeps_order = kind(dataset) in ("Map", "ParallelMap")
    return any(
        is_nondeterministic(function.graph.as_graph_def(), random_counts=not keeps_order)
        for function in functions(dataset)
    )


def _deterministic_base(dataset: Any, seed: int) -> Any:
    """Returns what comes before the known steps, rewritten as a graph where it must be."""
    is_deterministic = _is_deterministic(dataset)
    if is_deterministic and not any(reshuffles(each) for each in with_inputs(dataset)):
        return dataset
    try:
        return make_deterministic(dataset, seed, [fixed for _, fixed in _fixed_seeds(dataset)])
    except GraphTooLargeError as err:
        if nondeterministic_parts(dataset):
            raise refusal(dataset, "an operation without a seed, or a parallel one, after more than 2 GB") from err
    except DataError:  # as with an op that cannot be made again
        if not is_deterministic:
            raise
    if any(reshuffles(each) for each in with_inputs(dataset)):
        _log.warning(
            "A seeded shuffle in %s has one order on all ranks only if no rank iterates the dataset by itself. To look "
            "into the data, make a second dataset in the same way; or shuffle later in the pipeline.",
            dataset,
        )
    return dataset


def _refuse_service(dataset: Any) -> None:
    """Refuses elements that servers send: to each rank its own, or to all of them in any order."""
    if any(kind(each) == "DataService" for each in with_inputs(dataset)):
        raise DataError(
            "kdist cannot shard what the service of tf.data sends. Received: a pipeline with `service.distribute`. "
            "Expected one order on all ranks: the service shares the elements of a job out by itself, and orders them "
            "by its workers' speed. Fix: pass the same `job_name` on all ranks to `distribute`, and make the model in "
            "a scope with auto_shard=False: each rank trains on what it is sent."
        )


def _warn_of_random_decisions(dataset: Any) -> None:
    """Warns of elements that a rank may keep or leave out by random numbers of its own, which a map has drawn."""
    deciding = [each for each in with_inputs(dataset) if kind(each) in DECIDING]
    if not any(_draws(part) for each in deciding for part in with_inputs(each)):
        return
    kept = internals.resources_of(deciding[0])
    if "was_told_decisions" in kept:
        return
    kept["was_told_decisions"] = True
    _log.warning(
        "A tf.data pipeline keeps or groups elements (%s) after a map has drawn random numbers unseeded, or in "
        "parallel calls, which are others on each rank: ranks may keep other elements. Fix: filter and group earlier; "
        "or call `keras.utils.set_random_seed` before the dataset is made, and leave out `num_parallel_calls` there or "
        "draw by `tf.random.stateless_uniform` and the like.",
        ", ".join(sorted({kind(each) for each in deciding})),
    )


def _draws(dataset: Any) -> bool:
    """Returns whether a map draws numbers that may be others on each rank: parallel calls take them in any order."""
    if kind(dataset) == "ParallelMap":
        return any(draws(each.graph.as_graph_def()) or random_states(each) for each in functions(dataset))
    return kind(dataset) == "Map" and any(draws_unseeded(each.graph.as_graph_def()) for each in functions(dataset))


def nondeterministic_parts(dataset: Any) -> list[str]:
    """Returns descriptions of the operations in a pipeline that may order elements differently on each rank.

    Only what can be seen without serialising the pipeline is found. Of a parallel interleave nothing is seen: it may.
    What TensorFlow has made of a variant tensor, as the choices of `choose_from_datasets`, is serialised, and what
    holds datasets that are no inputs.
    """
    return [
        " ".join(_description(part) for part in with_inputs(each))
        for each in with_inputs(dataset)
        if kind(each) == "ParallelInterleave"
        or is_nondeterministic_op(each)
        or _has_nondeterministic_function(each)
        or (_shows_only_its_graph(each) and _has_nondeterministic_graph(each))
    ]


def _shows_only_its_graph(dataset: Any) -> bool:
    is_made_of_variant = kind(dataset) == "Variant" and not internals.is_of_kdist(dataset)
    return is_made_of_variant or internals.holds_datasets(dataset)


def _has_nondeterministic_graph(dataset: Any) -> bool:
    try:
        return is_nondeterministic(graph_of(dataset), random_counts=False)
    except Exception:  # TensorFlow raises several kinds: too large, not serializable, ...
        return False


def _is_deterministic(dataset: Any) -> bool:
    """Returns whether a dataset is known to have one order, without serialising its graph, which may be large."""
    return all(
        (internals.is_known(each) and kind(each) != "Random")
        and not internals.holds_datasets(each)
        and not is_nondeterministic_op(each)
        and not _has_nondeterministic_function(each)
        and not _calls_away(each)
        for each in with_inputs(dataset)
    )


def _fixed_seeds(dataset: Any) -> list[tuple[int, int]]:
    """Returns the id of each shuffle without a seed, inputs first, with the seed for one order in all passes.

    All datasets made of such a shuffle must have one order, whichever call they are given to and whatever they are
    joined with there: a part for training and one for validation would overlap. So the seed is derived from what is
    shuffled.
    """
    found: dict[int, int] = {}
    visits, num_equal = [], collections.Counter[str]()
    for each in inputs_first(dataset):
        if kind(each) == "Shuffle" and is_nondeterministic_op(each):
            if id(each) not in found:
                shuffled = " ".join(_description(part) for part in with_inputs(each))
                found[id(each)] = derived_seed(zlib.crc32(shuffled.encode()), num_equal[shuffled])
                num_equal[shuffled] += 1
            visits.append((id(each), found[id(each)]))
    return visits


def _description(dataset: Any) -> str:
    op = attributes(dataset)
    bounds = [str(getattr(op, name, "")) for name in ("start", "stop", "step")]
    lengths = [str(leaf.shape) for leaf in getattr(op, "tensors", ()) if hasattr(leaf, "shape")]
    return " ".join([type(dataset).__name__, str(dataset.element_spec), *bounds, *lengths])
