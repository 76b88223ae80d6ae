"""Which batches of a `tf.data` stream, or rows of them, are this rank's, selected as early in it as possible."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kdist.data.batch import Rows, Shard, int64, slice_or_first
from kdist.data.graphs.dataset_internals import kind
from kdist.data.graphs.optionals import from_optional
from kdist.data.graphs.own_functions import is_dense, mapped
from kdist.data.joined_batches import joined
from kdist.data.pipelines.groups import element_of, grouped
from kdist.data.pipelines.pipeline import Pipeline
from kdist.data.pipelines.tail import Tail, is_map, tail_of
from kdist.data.row_selection import select_rows
from kdist.data.sharding import Plan


class Selection(NamedTuple):
    """This rank's shards of a stream.

    Attributes:
        dataset: dataset of `Shard`.
        knows_global_rows: bool, whether `global_rows` is known in it.
        parallel_maps: tuple of the user's dataset objects whose maps run in parallel without a tuner.
        is_rewritten: bool, whether TensorFlow may gain by another form of it.
    """

    dataset: tf.data.Dataset
    knows_global_rows: bool
    parallel_maps: tuple[Any, ...]
    is_rewritten: bool


def select_shards(pipeline: Pipeline, plan: Plan, rows: Rows) -> Selection:
    """Selects this rank's share of each group of batches: one of them, or with `plan.splits_rows` a slice of all rows.

    It is selected in front of the pipeline's `tail_of`, so that the user's functions run for this rank's samples only;
    of a numbered source only these are read.

    Args:
        pipeline: `Pipeline` of batches, the same on all ranks.
        plan: `Plan`. Groups restart after each `steps_per_epoch` batches.
        rows: `Rows` of the batches.

    Returns:
        A `Selection`. An iterator of its dataset raises `InvalidArgumentError` where rows are to be joined that have
        different shapes.
    """
    size = rows.size
    tail = tail_of(pipeline, plan, static=size is not None)
    maps_batches = any(map(is_map, tail.batch_maps))
    known = size is not None or not maps_batches

    def to_shard(data: Any, own: Any, total: Any) -> Shard:
        if maps_batches:  # which may change the number of rows; and the other batches' maps run on other ranks
            own = tf.where(own > 0, int64(rows.count(data)), 0)
            total = total if known else tf.constant(-1, tf.int64)
        return Shard(data if is_cut else rows.head(data, tf.maximum(own, 1)), own, total)

    finish = _as_tuple if maps_batches else to_shard
    mapped_size = size if maps_batches else None
    is_padded = tail.fills_steps or mapped_size is not None  # maps of batches may rely on their size
    is_whole = maps_batches or (is_padded and bool(tail.sample_maps))
    is_cut = plan.splits_rows or (tail.numbered is not None and not is_whole)
    applied = tail.batch_maps
    if tail.numbered is not None:
        applied += tail.sample_maps
        selected = select_rows(tail, tail.numbered, mapped_size, is_padded, is_whole, finish)
    elif any(map(is_map, tail.sample_maps)):
        applied += tail.sample_maps
        selected = _select_samples(tail, mapped_size, is_padded, finish)
    else:
        count = (lambda _: size or 1) if maps_batches else rows.count_equal if plan.splits_rows else rows.count
        selected = _select_elements(tail.batches(), plan, finish, count, rows.slice, joined)
    for step in tail.batch_maps:
        selected = tail.apply_to_first(step, selected)
    # It joins a shuffle with a `repeat`, and maps with a batch: not numbers and kdist's own functions.
    is_rewritten = tail.numbered is None or any(is_map(step) or kind(step) == "Repeat" for step in pipeline.steps)
    shards = selected.map(to_shard) if maps_batches else selected
    return Selection(shards, known, applied if tail.makes_maps_parallel else (), is_rewritten)


def _select_elements(
    dataset: tf.data.Dataset,
    plan: Plan,
    finish: Callable[[Any, Any, Any], Any],
    count: Callable[[Any], Any],
    cut: Callable[[Any, Any, Any], Any],
    join: Callable[[Sequence[Any]], Any],
) -> tf.data.Dataset:
    """Selects one element of each group of `plan.num_shards`, or with `plan.splits_rows` a slice of all their rows.

    Args:
        dataset: `tf.data.Dataset` of elements with rows.
        plan: `Plan`. Groups restart after each `steps_per_epoch` elements.
        finish: callable that takes `(element, own, total)`: what is this rank's of the group, or the group's first
            element or row where nothing is; the number of its own rows, and that of the group, by `count`.
        count: callable that takes an element and returns its number of rows. An element of none is skipped.
        cut: callable that takes an element and returns its rows from a first to a last one, not included.
        join: callable that takes a sequence of such parts and returns one element.

    Returns:
        A dataset of what `finish` returns.
    """
    spec, size = dataset.element_spec, plan.group_size

    def select(elements: Any, counts: Any) -> Any:
        own = tf.reduce_sum(counts[plan.shard_id : plan.shard_id + 1])
        # The first with any row, where this rank has none.
        position = tf.where(own > 0, int64(plan.shard_id), tf.argmax(tf.cast(counts > 0, tf.int32)))
        return finish(from_optional(spec, elements[position]), own, tf.reduce_sum(counts))

    def split(elements: Any, counts: Any) -> Any:
        there = tf.argmax(tf.cast(counts > 0, tf.int32))
        counts = tf.pad(counts, [[0, size - tf.shape(counts)[0]]])
        total = tf.reduce_sum(counts)
        start, stop, own = slice_or_first(total, plan.num_shards, plan.shard_id)
        firsts = tf.cumsum(counts, exclusive=True)
        parts = []
        for place in range(size):
            element = from_optional(spec, elements[tf.where(counts[place] > 0, int64(place), there)])
            bounds = (tf.clip_by_value(bound - firsts[place], 0, counts[place]) for bound in (start, stop))
            parts.append(cut(element, *bounds))
        return finish(join(parts), own, total)

    groups, function = grouped(dataset, plan, count), split if plan.splits_rows else select
    return mapped(groups, function) if is_dense(spec) else groups.map(function)


def _select_samples(
    tail: Tail, size: int | None, is_padded: bool, finish: Callable[[Any, Any, Any], Any]
) -> tf.data.Dataset:
    """Selects this rank's samples in front of the maps that precede a batch, and batches them again.

    See `select_rows` for the arguments and the result.
    """
    samples = tail.samples()
    spec = samples.element_spec

    def to_dataset(*window: Any) -> Any:
        return tf.data.Dataset.zip(element_of(spec, window))

    def samples_of(window: Any, own: Any, total: Any) -> Any:
        count = tf.where((own > 0) | is_padded, window.cardinality(), 1)
        filled = window.concatenate(window.take(1).repeat())
        window = filled.take(tail.most_rows if is_padded else count)
        return tf.data.Dataset.zip(window, tf.data.Dataset.from_tensors([own, total, count]).repeat())

    def cut(window: Any, start: Any, stop: Any) -> Any:
        return window.skip(start).take(stop - start)

    def join(windows: Sequence[Any]) -> Any:
        return functools.reduce(tf.data.Dataset.concatenate, windows)

    windows = samples.window(tail.batch_size, drop_remainder=tail.drop_remainder).map(to_dataset)
    count = (lambda window: window.cardinality()) if size is None else (lambda _: size)
    selected = _select_elements(tail.order_batches(windows), tail.plan, _as_tuple, count, cut, join)
    return tail.map_and_batch(selected.flat_map(samples_of), is_padded, finish)


def _as_tuple(element: Any, own: Any, total: Any) -> Any:
    return element, own, total
