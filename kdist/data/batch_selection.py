"""Which batches of a `tf.data` stream are this rank's, selected as early in the pipeline as possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from kdist.data.batch import Rows, Shard, int64
from kdist.data.graphs.optionals import from_optional
from kdist.data.graphs.pipeline import Pipeline
from kdist.data.graphs.tail import Tail, is_map, tail_of
from kdist.data.groups import element_of, grouped
from kdist.data.row_selection import select_rows
from kdist.data.sharding import Plan


class Selection(NamedTuple):
    """This rank's batches of a stream.

    Attributes:
        dataset: dataset of `Shard`.
        knows_global_rows: bool, whether `global_rows` is known in it.
        parallel_maps: tuple of the user's dataset objects whose maps run in parallel without a tuner.
    """

    dataset: tf.data.Dataset
    knows_global_rows: bool
    parallel_maps: tuple[Any, ...]


def select_batches(pipeline: Pipeline, plan: Plan, rows: Rows) -> Selection:
    """Selects one batch of each group of `plan.num_shards`.

    The batch is selected in front of the pipeline's `tail_of`, so that the user's functions run for this rank's samples
    only; of a numbered source only these are read.

    Args:
        pipeline: `Pipeline` of batches, the same on all ranks.
        plan: `Plan`. Groups restart after each `steps_per_epoch` batches.
        rows: `Rows` of the batches.

    Returns:
        A `Selection`.
    """
    size, exact = rows.size, plan.fills_groups
    tail = tail_of(pipeline, exact=exact, static=size is not None)
    mapped = any(map(is_map, tail.batch_maps))
    known = size is not None or not mapped

    def to_shard(data: Any, active: Any, total: Any) -> Shard:
        count = int64(rows.count(data))
        data = rows.head(data, tf.where(active, count, 1))
        # A map may change the number of rows, and the other batches' maps run on other ranks.
        total = total if known else tf.constant(-1, tf.int64)
        return Shard(data, tf.where(active, count, 0), total)

    finish = _as_tuple if mapped else to_shard
    mapped_size = size if mapped else None
    # Samples of consecutive batches are joined again by their number; and maps of batches may rely on their size.
    is_padded = not exact or tail.reorders_batches or mapped_size is not None
    applied = tail.batch_maps
    if tail.numbered is not None:
        applied += tail.sample_maps
        selected = select_rows(tail, tail.numbered, plan, mapped_size, is_padded, finish)
    elif any(map(is_map, tail.sample_maps)):
        applied += tail.sample_maps
        selected = _select_samples(tail, plan, mapped_size, is_padded, finish)
    else:
        count = (lambda _: size or 1) if mapped else rows.count
        selected = _select_elements(tail.batches(), plan, finish, count)
    for step in tail.batch_maps:
        selected = tail.apply_to_first(step, selected, plan.shard_id)
    return Selection(selected.map(to_shard) if mapped else selected, known, applied if tail.makes_maps_parallel else ())


def _select_elements(
    dataset: tf.data.Dataset, plan: Plan, finish: Callable[[Any, Any, Any], Any], count: Callable[[Any], Any]
) -> tf.data.Dataset:
    """Selects one element of each group of `plan.num_shards`.

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

    def select(elements: Any, rows: Any) -> Any:
        active = tf.reduce_any(rows[plan.shard_id : plan.shard_id + 1] > 0)
        # The first with any row, where this rank has none.
        position = tf.where(active, int64(plan.shard_id), tf.argmax(tf.cast(rows > 0, tf.int32)))
        return finish(from_optional(spec, elements[position]), active, tf.reduce_sum(rows))

    return grouped(dataset, plan, count).map(select)


def _select_samples(
    tail: Tail, plan: Plan, size: int | None, is_padded: bool, finish: Callable[[Any, Any, Any], Any]
) -> tf.data.Dataset:
    """Selects this rank's samples in front of the maps that precede a batch, and batches them again.

    See `select_rows` for the arguments and the result.
    """
    samples = tail.samples()
    spec = samples.element_spec

    def to_dataset(*window: Any) -> Any:
        return tf.data.Dataset.zip(element_of(spec, window))

    def samples_of(window: Any, active: Any, total: Any) -> Any:
        count = tf.where(active | is_padded, window.cardinality(), 1)
        facts = tf.data.Dataset.from_tensors((active, total, count)).repeat()
        if not is_padded:
            window = window.take(count)
        elif not tail.drop_remainder:
            window = window.concatenate(window.take(1).repeat()).take(tail.batch_size)
        return tf.data.Dataset.zip(window, facts)

    def join(batch: Any, facts: Any) -> Any:
        active, total, count = (fact[0] for fact in facts)
        if is_padded and not tail.drop_remainder:
            batch = tf.nest.map_structure(lambda leaf: leaf[:count], batch)
        return finish(batch, active, total)

    windows = samples.window(tail.batch_size, drop_remainder=tail.drop_remainder).map(to_dataset)
    counted = (lambda window: window.cardinality()) if size is None else (lambda _: size)
    selected = _select_elements(tail.order_batches(windows), plan, _as_tuple, counted).flat_map(samples_of)
    for step in tail.sample_maps:
        selected = tail.apply_to_first(step, selected, plan.shard_id)
    return selected.batch(tail.batch_size).map(join)


def _as_tuple(element: Any, active: Any, total: Any) -> Any:
    return element, active, total
