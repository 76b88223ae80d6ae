"""Which rows of a numbered source are this rank's: the pipeline is followed on numbers, and only own rows are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.data.batch import int64, slice_or_first
from kdist.data.graphs.indexed import Indexed
from kdist.data.graphs.tail import Tail
from kdist.data.groups import pad_epochs

_NO_ROW = -1


def select_rows(
    tail: Tail,
    source: Indexed,
    size: int | None,
    is_padded: bool,
    is_whole: bool,
    finish: Callable[[Any, Any, Any], Any],
) -> tf.data.Dataset:
    """Selects this rank's rows of each group of batches, and applies the maps of samples to them.

    Args:
        tail: `Tail` with a batch.
        source: `Indexed`, its elements.
        size: int or `None`, the rows of each batch after the maps of batches, if there are any and it is known.
        is_padded: bool, whether a rank's rows, and those of a rank without any, are filled up for the maps.
        is_whole: bool, whether a rank without any takes all rows of the first batch, instead of its first one.
        finish: callable that takes `(data, own, total)` and returns the element of the result.

    Returns:
        A dataset of what `finish` returns. `data` is this rank's rows of the group, or those of the first batch where
        there are none; `own` is their number, and `total` that of the group.
    """
    plan = tail.plan
    groups, rows_of, counts_of = _groups(tail, source.length)

    # An iterator prepares each function anew: the fewer operations it has, the sooner a verb begins.
    def choose(group: Any) -> tuple[Any, Any, Any]:
        rows, counts = rows_of(group), counts_of(group)
        total = tf.reduce_sum(counts)
        if plan.splits_rows:
            start, stop, own = slice_or_first(total, plan.num_shards, plan.shard_id)
            if plan.group_size > 1:
                rows = tf.boolean_mask(rows, tf.sequence_mask(counts, tail.batch_size))[None]
            return rows[0, start:stop], own, total
        own = tf.reduce_sum(counts[plan.shard_id : plan.shard_id + 1])
        place = tf.where(own > 0, plan.shard_id, 0)
        chosen, count = tf.gather(rows, place), tf.gather(counts, place) if is_whole else tf.maximum(own, 1)
        if size is not None:
            total = size * tf.math.count_nonzero(counts)
        return chosen if is_whole and tail.drop_remainder else chosen[:count], own, total

    def own_batch(group: Any) -> Any:
        chosen, own, total = choose(group)
        return finish(source.gather(chosen), own, total)

    def own_samples(group: Any) -> Any:
        chosen, own, total = choose(group)
        count = tf.size(chosen, tf.int64)
        chosen = tf.concat([chosen, tf.repeat(chosen[:1], tail.most_rows - count if is_padded else 0)], 0)
        return source.gather(chosen), tf.repeat([[own, total, count]], tf.size(chosen), 0)

    if not tail.sample_maps:
        return groups.map(own_batch)
    samples = groups.map(own_samples).unbatch()
    return tail.map_and_batch(samples, is_padded, finish)


def _groups(tail: Tail, length: int) -> tuple[tf.data.Dataset, Callable[[Any], Any], Callable[[Any], Any]]:
    """Returns a dataset of groups, and functions that take one: what its rows are, and how many each batch has.

    The rows are the numbers of its samples, a matrix with a row for each batch. Behind the end of a batch it has
    numbers that are of no sample.
    """
    size, plan = tail.batch_size, tail.plan
    if tail.reorders_samples:
        samples = tail.order_samples(tf.data.Dataset.range(length))
        batches = tail.order_batches(samples.batch(size, drop_remainder=tail.drop_remainder))
        batches = pad_epochs(batches, lambda: tf.data.Dataset.from_tensors(tf.fill([size], int64(_NO_ROW))), plan)
        groups = batches.padded_batch(plan.group_size, padded_shapes=[size], padding_values=int64(_NO_ROW))
        return groups, lambda rows: rows, lambda rows: tf.reduce_sum(int64(rows > _NO_ROW), 1)
    # Batches of the source's own order are known by the number of their first sample.
    end = length - length % size if tail.drop_remainder else length
    firsts = tail.order_batches(tf.data.Dataset.range(0, end, size))
    groups = pad_epochs(firsts, lambda: tf.data.Dataset.from_tensors(int64(end)), plan).batch(plan.group_size)
    return groups, lambda firsts: firsts[:, None] + np.arange(size), lambda firsts: tf.minimum(end - firsts, size)
