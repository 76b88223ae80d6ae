"""The end of a pipeline over which the choice of a rank's rows can be moved towards the source.

Its steps are of three kinds. Maps make one element of one: those that only compute from their argument may as well run
for the chosen elements only, after the choice. Other steps change the order of elements without looking at them. And
one step makes batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdist.data.graphs.dataset_internals import attributes, kind
from kdist.data.graphs.indexed import Indexed, indexed
from kdist.data.graphs.inspection import is_stateless, leaves_maps_to_tensorflow
from kdist.data.graphs.own_functions import mapped
from kdist.data.pipelines.pipeline import Pipeline, apply_to_first, is_elementwise
from kdist.data.sharding import Plan

_MAPS = ("Map", "ParallelMap")
_BATCHES = ("Batch", "ParallelBatch")
_ORDERS = ("Repeat", "Shuffle", "Skip", "Take")


@dataclasses.dataclass(frozen=True)
class Tail:
    """The end of a pipeline.

    Attributes:
        pipeline: `Pipeline`.
        plan: `Plan`.
        start: int, the position of the first of its steps.
        batch: int or `None`, the position of the step that makes batches; `None` if they come from before the tail.
        numbered: `Indexed` or `None`, how the elements before the tail are read by their number.
    """

    pipeline: Pipeline
    plan: Plan
    start: int
    batch: int | None
    numbered: Indexed | None

    @property
    def sample_maps(self) -> tuple[Any, ...]:
        """The elementwise steps of single samples."""
        return () if self.batch is None else self._elementwise(self.start, self.batch)

    @property
    def batch_maps(self) -> tuple[Any, ...]:
        """The elementwise steps of batches."""
        return self._elementwise(self._first_of_batches, len(self.pipeline.steps))

    @property
    def reorders_samples(self) -> bool:
        """Whether a step before the batch changes the order of samples."""
        return self.batch is not None and self._reorders(self.start, self.batch)

    @property
    def reorders_batches(self) -> bool:
        """Whether a step after the batch changes the order of batches."""
        return self._reorders(self._first_of_batches, len(self.pipeline.steps))

    @property
    def batch_size(self) -> int:
        """The samples of a batch that the tail makes."""
        return int(attributes(self._batch).batch_size)

    @property
    def drop_remainder(self) -> bool:
        """Whether all batches that the tail makes have `batch_size` samples."""
        return bool(attributes(self._batch).drop_remainder)

    def order_samples(self, samples: tf.data.Dataset) -> tf.data.Dataset:
        """Returns elements in the order in which samples come to the batch; `samples` is in that of the source."""
        return samples if self.batch is None else self._order(samples, self.start, self.batch)

    def order_batches(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Returns elements in the order in which batches come out of the pipeline; `batches` is in that of the step."""
        return self._order(batches, self._first_of_batches, len(self.pipeline.steps))

    def samples(self) -> tf.data.Dataset:
        """Returns the samples of all ranks before the maps, in the order in which they come to the batch."""
        return self.order_samples(self.pipeline.dataset(self.start))

    def batches(self) -> tf.data.Dataset:
        """Returns the batches of all ranks before their maps, in the order in which they come out of the pipeline."""
        return self.order_batches(self.pipeline.dataset(self._first_of_batches))

    def apply_to_first(self, step: Any, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Applies one of the elementwise steps to the first component of a dataset's elements; see `pipeline`."""
        return apply_to_first(step, dataset, self.plan.shard_id, parallel=self.makes_maps_parallel)

    @property
    def most_rows(self) -> int:
        """The samples of a rank in a step, at most."""
        return self.plan.most_rows(self.batch_size)

    @property
    def fills_steps(self) -> bool:
        """Whether a rank's samples of a step are to be filled up, for `map_and_batch` joins consecutive ones."""
        if self.batch is None:
            return False
        is_even = self.plan.group_size * self.batch_size % self.plan.num_shards == 0
        return not (is_even and self.plan.fills_groups) or self.reorders_batches

    def map_and_batch(
        self, samples: tf.data.Dataset, is_padded: bool, finish: Callable[[Any, Any, Any], Any]
    ) -> tf.data.Dataset:
        """Applies the maps of samples to this rank's, and makes one element of those of a step.

        Args:
            samples: dataset of pairs: a sample, and the vector of the number of this rank's rows in the step, that of
                all ranks' rows, and that of the samples here.
            is_padded: bool, whether each step has been filled up to `most_rows` samples.
            finish: callable that takes the data and the two numbers of rows, and returns the element.
        """

        def join(data: Any, facts: Any) -> Any:
            own, total, count = tf.unstack(facts[0], 3)
            if is_padded:
                data = tf.nest.map_structure(lambda leaf: leaf[:count], data)
            return finish(data, own, total)

        for step in self.sample_maps:
            samples = self.apply_to_first(step, samples)
        return mapped(samples.batch(self.most_rows), join)

    @property
    def makes_maps_parallel(self) -> bool:
        """Whether maps run in parallel that were not asked to, if they only compute from their argument."""
        return leaves_maps_to_tensorflow(self.pipeline.options)

    @property
    def _batch(self) -> Any:
        return None if self.batch is None else self.pipeline.steps[self.batch]

    @property
    def _first_of_batches(self) -> int:
        return self.start if self.batch is None else self.batch + 1

    def _reorders(self, first: int, end: int) -> bool:
        return any(kind(step) in _ORDERS for step in self.pipeline.steps[first:end])

    def _order(self, dataset: tf.data.Dataset, first: int, end: int) -> tf.data.Dataset:
        for position in range(first, end):
            if kind(self.pipeline.steps[position]) in _ORDERS:
                dataset = self.pipeline.apply(position, dataset)
        return dataset

    def _elementwise(self, first: int, end: int) -> tuple[Any, ...]:
        """Returns the elementwise steps, without a `prefetch` that a step of another kind follows."""
        steps = self.pipeline.steps[first:end]
        last = max((number for number, step in enumerate(steps) if not is_elementwise(step)), default=-1)
        return tuple(
            step
            for number, step in enumerate(steps)
            if is_elementwise(step) and (number > last or kind(step) != "Prefetch")
        )


def tail_of(pipeline: Pipeline, plan: Plan, *, static: bool) -> Tail:
    """Returns the end of a pipeline.

    A map with a state, or that draws random numbers, is in it only if nothing but elementwise steps and one batch
    follow it: elsewhere it would be called in another order, or another number of times. Where ranks take parts of
    batches, neither is a map of batches, which may look at all rows, nor any map with a state: all ranks compute what
    one process would.

    Args:
        pipeline: `Pipeline` of batches.
        plan: `Plan`.
        static: bool, whether the number of rows of the pipeline's batches is known, which its maps may rely on.
    """
    steps = pipeline.steps
    start, batch, cache = len(steps), None, None
    reordered = mapped = False
    exact = plan.fills_groups  # without gaps between the groups
    while start:
        step = steps[start - 1]
        if kind(step) == "Cache":
            cache = start if cache is None else cache
        elif is_map(step) and is_elementwise(step):
            stays = plan.splits_rows or reordered or (batch is not None and not exact)
            of_whole = plan.splits_rows and batch is None
            if cache is not None or of_whole or (stays and not is_stateless(step)):
                break
            mapped = mapped or batch is None
        elif kind(step) in _BATCHES and batch is None and (not plan.splits_rows or _has_one_shape(step)):
            batch, exact = start - 1, exact and not reordered and not (mapped and static)
        elif kind(step) in _ORDERS:
            reordered = True
        elif not is_elementwise(step):
            break
        start -= 1
    numbered = indexed(pipeline.dataset(0)) if start == 0 and batch is not None else None
    if numbered is None and cache is not None:  # what is iterated over comes from the user's cache
        start, batch = cache, None if batch is None or batch < cache else batch
    return Tail(pipeline, plan, start, batch, numbered)


def _has_one_shape(batches: Any) -> bool:
    """Returns whether the rows of all batches are known to have one shape, by which any of them can be joined."""
    leaves = tf.nest.flatten(batches.element_spec)
    return all(isinstance(leaf, tf.TensorSpec) and leaf.shape[1:].is_fully_defined() for leaf in leaves)


def is_map(step: Any) -> bool:
    """Returns whether a step is a `map`."""
    return kind(step) in _MAPS
