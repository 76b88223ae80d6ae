"""Which rows of a numbered source are this rank's: the pipeline is followed on numbers, and only own rows are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdist.data.batch import int64, slice_or_first
from kdist.data.graphs.indexed import Indexed
from kdist.data.graphs.tail import Tail
from kdist.data.groups import pad_epochs

_NO_ROW = -1


def select_rows(
    tail: Tail, source: Indexed, size: int | None, is_padded: bool, finish: Callable[[Any, Any, Any], Any]
) -> tf.data.Dataset:
    """Selects this rank's rows of each group of batches, and applies the maps of samples to them.

    Args:
        tail: `Tail` with a batch.
        source: `Indexed`, its elements.
        size: int or `None`, the rows of each batch after the maps of batches, if there are any and it is known.
        is_padded: bool, whether a rank's rows, and those of a rank without any, are filled up for the maps.
        finish: callable that takes `(data, own, total)` and returns the element of the result.

    Returns:
        A dataset of what `finish` returns. `data` is this rank's rows of the group, or the first batch or its first
        row where there are none; `own` is their number, and `total` that of the group.
    """
    plan = tail.plan

    def choose(rows: Any) -> tuple[Any, Any, Any]:
        is_row = rows >= 0
        if plan.splits_rows:
            rows = tf.boolean_mask(rows, is_row)
            start, stop, own = slice_or_first(tf.size(rows, tf.int64), plan.num_shards, plan.shard_id)
            return rows[start:stop], own, tf.size(rows, tf.int64)
        active = tf.reduce_any(is_row[plan.shard_id : plan.shard_id + 1])
        chosen = rows[tf.where(active, plan.shard_id, 0)]
        chosen = chosen if tail.drop_remainder else chosen[: tf.math.count_nonzero(chosen >= 0)]
        total = tf.math.count_nonzero(is_row) if size is None else size * tf.math.count_nonzero(is_row[:, 0])
        return chosen, tf.where(active, tf.size(chosen, tf.int64), 0), total

    def own_batch(rows: Any) -> Any:
        chosen, own, total = choose(rows)
        return finish(source.gather(chosen), own, total)

    def own_samples(rows: Any) -> Any:
        chosen, own, total = choose(rows)
        count = tf.where((own > 0) | is_padded, tf.size(chosen, tf.int64), 1)
        missing = tail.most_rows - count if is_padded else 0
        chosen = tf.concat([chosen[:count], tf.repeat(chosen[:1], missing)], 0)
        return source.gather(chosen), tf.repeat([[own, total, count]], tf.size(chosen), 0)

    groups, rows_of = _groups(tail, source.length)
    if not tail.sample_maps:
        return groups.map(lambda group: own_batch(rows_of(group)))
    samples = groups.map(lambda group: own_samples(rows_of(group))).unbatch()
    return tail.map_and_batch(samples, is_padded, finish)


def _groups(tail: Tail, length: int) -> tuple[tf.data.Dataset, Callable[[Any], Any]]:
    """Returns a dataset of groups, and a function that takes one and returns the numbers of its samples.

    These are a matrix with a row for each batch, filled up with -1.
    """
    size, plan = tail.batch_size, tail.plan
    if tail.reorders_samples:
        samples = tail.order_samples(tf.data.Dataset.range(length))
        batches = tail.order_batches(samples.batch(size, drop_remainder=tail.drop_remainder))
        batches = pad_epochs(batches, lambda: tf.data.Dataset.from_tensors(tf.fill([size], int64(_NO_ROW))), plan)
        groups = batches.padded_batch(plan.group_size, padded_shapes=[size], padding_values=int64(_NO_ROW))
        return groups, lambda rows: rows
    # Batches of the source's own order are known by the number of their first sample.
    end = length - length % size if tail.drop_remainder else length
    firsts = tail.order_batches(tf.data.Dataset.range(0, end, size))
    firsts = pad_epochs(firsts, lambda: tf.data.Dataset.from_tensors(int64(_NO_ROW)), plan)

    def rows_of(firsts: Any) -> Any:
        rows = firsts[:, None] + tf.range(size, dtype=tf.int64)
        return tf.where((firsts[:, None] >= 0) & (rows < end), rows, _NO_ROW)

    return firsts.batch(plan.group_size), rows_of
