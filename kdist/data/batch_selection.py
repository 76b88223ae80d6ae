"""Which batches of a `tf.data` stream are this rank's, selected as early in the pipeline as possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdist.data.batch import Rows, Shard, int64
from kdist.data.graphs.dataset_internals import attributes, kind
from kdist.data.graphs.optionals import empty_optional, from_optional, to_optional
from kdist.data.graphs.pipeline import Pipeline, apply_to_first, is_elementwise
from kdist.data.sharding import Plan


def select_batches(pipeline: Pipeline, plan: Plan, rows: Rows) -> tuple[tf.data.Dataset, bool]:
    """Selects one batch of each group of `plan.num_shards`.

    The batch is selected in front of the pipeline's last `map` steps, and in front of those of single samples where a
    `batch` follows them, so that the user's functions run for this rank's samples only.

    Args:
        pipeline: `Pipeline` of batches, the same on all ranks.
        plan: `Plan`. Groups restart after each `steps_per_epoch` batches.
        rows: `Rows` of the batches.

    Returns:
        `(dataset, known)`: a dataset of `Shard`, and whether `global_rows` is known in it.
    """
    steps = pipeline.steps
    batch = _first_elementwise(steps, len(steps)) - 1
    after = steps[batch + 1 :]
    sample = _first_elementwise(steps, batch) if batch >= 0 else -1
    mapped = _has_map(after)
    size = rows.size
    known = size is not None or not mapped

    def to_shard(data: Any, active: Any, total: Any) -> Shard:
        count = int64(rows.count(data))
        data = rows.head(data, tf.where(active, count, 1))
        # A map may change the number of rows, and the other batches' maps run on other ranks.
        total = total if known else tf.constant(-1, tf.int64)
        return Shard(data, tf.where(active, count, 0), total)

    whole_epochs = plan.steps_per_epoch is None or plan.steps_per_epoch % plan.num_shards == 0
    by_samples = batch >= 0 and kind(steps[batch]) in ("Batch", "ParallelBatch") and whole_epochs
    if by_samples and _has_map(steps[sample:batch]) and not (mapped and size is not None):
        selected = _select_samples(pipeline.dataset(sample), steps[sample:batch], steps[batch], plan)
    elif not mapped:
        dataset = pipeline.dataset()
        return _select_elements(dataset, plan, to_shard, rows.count), known
    else:
        selected = _select_elements(pipeline.dataset(batch + 1), plan, _as_tuple, lambda _: size or 1)
    for step in after:
        selected = apply_to_first(step, selected, plan.shard_id)
    return selected.map(to_shard), known


def element_of(spec: Any, arguments: tuple[Any, ...]) -> Any:
    """Returns the element that `tf.data` passed to a function: it unpacks a plain tuple into the arguments."""
    return arguments if type(spec) is tuple else arguments[0]


def _select_elements(
    dataset: tf.data.Dataset, plan: Plan, finish: Callable[[Any, Any, Any], Any], count: Callable[[Any], Any]
) -> tf.data.Dataset:
    """Selects one element of each group of `plan.num_shards`.

    Elements pass through `batch` as optionals, by reference: nothing is copied, shapes may differ.

    Args:
        dataset: `tf.data.Dataset` of any elements.
        plan: `Plan`. Groups restart after each `steps_per_epoch` elements.
        finish: callable that takes `(element, active, total)`: this rank's element of the group, or the group's
            first where `active` is `False`; and the sum of what `count` returned in the group.
        count: callable that takes an element and returns its number of rows. An element of none is skipped.

    Returns:
        A dataset of what `finish` returns.
    """
    spec = dataset.element_spec

    def pack(*arguments: Any) -> Any:
        element = element_of(spec, arguments)
        return to_optional(element), int64(count(element))

    def select(elements: Any, rows: Any) -> Any:
        active = tf.reduce_any(rows[plan.shard_id : plan.shard_id + 1] > 0)
        # The first with any row, where this rank has none.
        position = tf.where(active, int64(plan.shard_id), tf.argmax(tf.cast(rows > 0, tf.int32)))
        return finish(from_optional(spec, elements[position]), active, tf.reduce_sum(rows))

    packed = dataset.map(pack)
    epoch = plan.steps_per_epoch
    if epoch is not None and epoch % plan.num_shards:
        empty = tf.data.Dataset.from_tensors(0).map(lambda _: (empty_optional(), tf.constant(0, tf.int64)))
        padded = -(-epoch // plan.num_shards) * plan.num_shards
        choice = tf.data.Dataset.range(padded).map(lambda number: int64(number >= epoch)).repeat()
        packed = tf.data.Dataset.choose_from_datasets([packed, empty.repeat()], choice, stop_on_empty_dataset=True)
    return packed.batch(plan.num_shards).map(select)


def _select_samples(samples: Any, maps: tuple[Any, ...], batch: Any, plan: Plan) -> tf.data.Dataset:
    """Selects this rank's samples in front of the maps that precede a batch, and batches them again.

    A rank without a batch, which happens in the last step only, takes one sample.
    """
    op, spec = attributes(batch), samples.element_spec

    def to_dataset(*window: Any) -> Any:
        return tf.data.Dataset.zip(element_of(spec, window))

    def samples_of(window: Any, active: Any, total: Any) -> Any:
        window = window.take(tf.where(active, int64(-1), 1))
        return tf.data.Dataset.zip(window, tf.data.Dataset.from_tensors((active, total)).repeat())

    windows = samples.window(int(op.batch_size), drop_remainder=bool(op.drop_remainder)).map(to_dataset)
    selected = _select_elements(windows, plan, _as_tuple, lambda window: window.cardinality()).flat_map(samples_of)
    selected = selected.map(lambda sample, step: (sample, *step))
    for step in maps:
        selected = apply_to_first(step, selected, plan.shard_id)
    return selected.batch(int(op.batch_size)).map(lambda data, active, total: (data, active[0], total[0]))


def _first_elementwise(steps: tuple[Any, ...], end: int) -> int:
    """Returns the position of the first of the elementwise steps that end at `end`."""
    while end > 0 and is_elementwise(steps[end - 1]):
        end -= 1
    return end


def _has_map(steps: tuple[Any, ...]) -> bool:
    return any(kind(step) in ("Map", "ParallelMap") for step in steps)


def _as_tuple(element: Any, active: Any, total: Any) -> Any:
    return element, active, total
