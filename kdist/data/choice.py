"""Which batches of a common `tf.data` stream are this rank's, chosen as early in the pipeline as it allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdist.data import pipeline, variants
from kdist.data.pipeline import Pipeline
from kdist.data.shard import Shard, count_rows, int64, row_leaves, slice_rows
from kdist.data.sharding import Plan


def own_of_each_group(ordered: Pipeline, plan: Plan) -> tuple[tf.data.Dataset, bool]:
    """Takes one batch of each group of `plan.num_shards`.

    The choice is made in front of the pipeline's last `map` steps, and in front of those of single samples where a
    `batch` follows them, so that the user's functions run for this rank's samples only.

    Args:
        ordered: `Pipeline` of batches, the same on all ranks.
        plan: `Plan`. Groups restart after each `steps_per_epoch` batches.

    Returns:
        `(dataset, known)`: a dataset of `Shard`, and whether `global_rows` is known in it.
    """
    steps = ordered.steps
    batch = _first_carried(steps, len(steps)) - 1
    after = steps[batch + 1 :]
    sample = _first_carried(steps, batch) if batch >= 0 else -1
    mapped = _has_map(after)
    size = _static_rows(ordered.dataset().element_spec)
    known = size is not None or not mapped

    def finish(data: Any, active: Any, total: Any) -> Shard:
        rows = count_rows(data)
        data = slice_rows(data, 0, tf.where(active, rows, 1))
        # A map may change the number of rows, and the others' maps run on other ranks.
        total = total if known else tf.constant(-1, tf.int64)
        return Shard(data, tf.where(active, rows, 0), total)

    whole_epochs = plan.steps_per_epoch is None or plan.steps_per_epoch % plan.num_shards == 0
    by_samples = batch >= 0 and "Batch" in type(steps[batch]).__name__ and whole_epochs
    if by_samples and _has_map(steps[sample:batch]) and not (mapped and size is not None):
        chosen = _own_samples(ordered.dataset(sample), steps[sample:batch], steps[batch], plan)
    elif not mapped:
        return pick(ordered.dataset(), plan, finish, lambda element: size or count_rows(element)), known
    else:
        chosen = pick(ordered.dataset(batch + 1), plan, _triple, lambda _: size or 1)
    for step in after:
        chosen = pipeline.beside(step, chosen, plan.shard_id)
    return chosen.map(finish), known


def pick(
    dataset: tf.data.Dataset, plan: Plan, finish: Callable[[Any, Any, Any], Any], count: Callable[[Any], Any]
) -> tf.data.Dataset:
    """Takes one element of each group of `plan.num_shards`.

    Elements travel through `batch` as variants, by reference: nothing is copied, shapes may differ.

    Args:
        dataset: `tf.data.Dataset` of any elements.
        plan: `Plan`. Groups restart after each `steps_per_epoch` elements.
        finish: callable that takes `(element, active, total)`: this rank's element of the group, or the group's
            first where `active` is `False`; and the sum of what `count` returned in the group.
        count: callable that takes an element and returns its number of rows. An element of none is passed over.

    Returns:
        A dataset of what `finish` returns.
    """
    spec = dataset.element_spec

    def wrap(*arguments: Any) -> Any:
        element = spread(spec, arguments)
        return variants.wrap(element), int64(count(element))

    def choose(elements: Any, rows: Any) -> Any:
        active = tf.reduce_any(rows[plan.shard_id : plan.shard_id + 1] > 0)
        # The first that holds something, where this rank has none.
        place = tf.where(active, int64(plan.shard_id), tf.argmax(tf.cast(rows > 0, tf.int32)))
        return finish(variants.unwrap(spec, elements[place]), active, tf.reduce_sum(rows))

    wrapped = dataset.map(wrap)
    epoch = plan.steps_per_epoch
    if epoch is not None and epoch % plan.num_shards:
        blank = tf.data.Dataset.from_tensors(0).map(lambda _: (variants.blank(), tf.constant(0, tf.int64)))
        padded = -(-epoch // plan.num_shards) * plan.num_shards
        turns = tf.data.Dataset.range(padded).map(lambda turn: int64(turn >= epoch)).repeat()
        wrapped = tf.data.Dataset.choose_from_datasets([wrapped, blank.repeat()], turns, stop_on_empty_dataset=True)
    return wrapped.batch(plan.num_shards).map(choose)


def spread(spec: Any, arguments: tuple[Any, ...]) -> Any:
    """Returns the element that `tf.data` passed to a function: it spreads a plain tuple over the arguments."""
    return arguments if type(spec) is tuple else arguments[0]


def _own_samples(samples: Any, maps: tuple[Any, ...], batch: Any, plan: Plan) -> tf.data.Dataset:
    """Takes this rank's samples in front of the maps that precede a batch, and batches them again.

    A rank without a batch, which happens in the last step only, takes one sample.
    """
    size, spec = int(batch._batch_size), samples.element_spec

    def as_dataset(*window: Any) -> Any:
        return tf.data.Dataset.zip(spread(spec, window))

    def samples_of(window: Any, active: Any, total: Any) -> Any:
        window = window.take(tf.where(active, int64(-1), 1))
        return tf.data.Dataset.zip(window, tf.data.Dataset.from_tensors((active, total)).repeat())

    windows = samples.window(size, drop_remainder=bool(batch._drop_remainder)).map(as_dataset)
    own = pick(windows, plan, _triple, lambda window: window.cardinality()).flat_map(samples_of)
    own = own.map(lambda sample, step: (sample, *step))
    for step in maps:
        own = pipeline.beside(step, own, plan.shard_id)
    return own.batch(size).map(lambda data, active, total: (data, active[0], total[0]))


def _first_carried(steps: tuple[Any, ...], end: int) -> int:
    """Returns where the one-to-one steps that end at `end` begin."""
    while end > 0 and pipeline.carries_along(steps[end - 1]):
        end -= 1
    return end


def _has_map(steps: tuple[Any, ...]) -> bool:
    return any("Map" in type(step).__name__ for step in steps)


def _static_rows(spec: Any) -> int | None:
    leaves = row_leaves(spec)
    return leaves[0].shape[0] if leaves and leaves[0].shape.rank else None


def _triple(element: Any, active: Any, total: Any) -> Any:
    return element, active, total
