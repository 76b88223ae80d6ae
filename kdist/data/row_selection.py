"""Which rows of a numbered source are this rank's: the pipeline is followed on numbers, and only own rows are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.data.batch import int64, slice_or_first
from kdist.data.graphs.indexed import Indexed
from kdist.data.graphs.own_functions import mapped
from kdist.data.pipelines.groups import pad_epochs
from kdist.data.pipelines.tail import Tail

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
    groups, counts_of, cut = _groups(tail, source.length)

    # An iterator prepares each function anew: the fewer operations it has, the sooner a call begins.
    def choose(group: Any) -> tuple[Any, Any, Any]:
        counts, batches = tf.unstack(counts_of(group)), tf.unstack(group)
        total = tf.add_n(counts)
        if plan.splits_rows:
            start, stop, own = slice_or_first(total, plan.num_shards, plan.shard_id)
            return tf.concat([*map(cut, batches, counts)], 0)[start:stop], own, total
        own = counts[plan.shard_id]
        count = tf.where(own > 0, own, counts[0]) if is_whole else tf.maximum(own, 1)
        if size is not None:
            total = size * tf.math.count_nonzero(counts)
        chosen = tf.where(own > 0, batches[plan.shard_id], batches[0])
        return cut(chosen, tail.batch_size if is_whole and tail.drop_remainder else count), own, total

    def own_batch(group: Any) -> Any:
        chosen, own, total = choose(group)
        return finish(source.gather(chosen), own, total)

    def own_samples(group: Any) -> Any:
        chosen, own, total = choose(group)
        count = tf.size(chosen, tf.int64)
        chosen = tf.concat([chosen, tf.repeat(chosen[:1], tail.most_rows - count if is_padded else 0)], 0)
        return source.gather(chosen), tf.repeat([[own, total, count]], tf.size(chosen), 0)

    if not tail.sample_maps:
        return mapped(groups, own_batch)
    samples = mapped(groups, own_samples).unbatch()
    return tail.map_and_batch(samples, is_padded, finish)


def _groups(tail: Tail, length: int) -> tuple[tf.data.Dataset, Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """Returns a dataset of groups, and functions: how many rows a group's batches have, and the first of a batch."""
    size, plan = tail.batch_size, tail.plan
    if tail.reorders_samples:
        samples = tail.order_samples(tf.data.Dataset.range(length))
        batches, none = samples.batch(size, drop_remainder=tail.drop_remainder), tf.fill([size], int64(_NO_ROW))
    else:  # batches of the source's own order are known by the number of their first sample
        end = length - length % size if tail.drop_remainder else length
        batches, none = tf.data.Dataset.range(0, end, size), int64(end)
    nothing = tf.data.Dataset.from_tensors(none)  # fills the last group of an epoch, and of the data
    batches = pad_epochs(tail.order_batches(batches), lambda: nothing, plan)
    batches = batches.concatenate(nothing.repeat(plan.group_size - 1))
    groups = batches.padded_batch(plan.group_size, none.shape, int64(_NO_ROW), drop_remainder=True)
    if tail.reorders_samples:
        return groups, lambda rows: tf.reduce_sum(int64(rows > _NO_ROW), 1), lambda rows, n: tf.slice(rows, [0], [n])
    return (
        groups,
        lambda firsts: tf.minimum(end - firsts, size),
        lambda first, n: first + np.arange(n) if isinstance(n, int) else tf.range(first, first + n),
    )
