"""Which rows of a numbered source are this rank's: the pipeline is followed on numbers, and only own rows are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdist.data.batch import int64
from kdist.data.graphs.indexed import Indexed
from kdist.data.graphs.tail import Tail
from kdist.data.groups import pad_epochs
from kdist.data.sharding import Plan

_NO_ROW = -1


def select_rows(
    tail: Tail,
    source: Indexed,
    plan: Plan,
    size: int | None,
    is_padded: bool,
    finish: Callable[[Any, Any, Any], Any],
) -> tf.data.Dataset:
    """Selects one batch of each group of `plan.num_shards`, and applies the maps of samples to it.

    Args:
        tail: `Tail` with a batch.
        source: `Indexed`, its elements.
        plan: `Plan`.
        size: int or `None`, the rows of each batch after the maps of batches, if there are any and it is known.
        is_padded: bool, whether each batch, and one of a rank without any, is filled up for the maps.
        finish: callable that takes `(batch, active, total)` and returns the element of the result.

    Returns:
        A dataset of what `finish` returns. `batch` is this rank's batch of the group, or the first one or its first
        row where `active` is `False`; `total` is the number of rows in the group.
    """
    maps = tail.sample_maps
    is_full = tail.drop_remainder

    def choose(rows: Any) -> tuple[Any, Any, Any]:
        is_row = rows >= 0
        active = tf.reduce_any(is_row[plan.shard_id : plan.shard_id + 1])
        own = rows[tf.where(active, plan.shard_id, 0)]
        total = tf.math.count_nonzero(is_row) if size is None else size * tf.math.count_nonzero(is_row[:, 0])
        return own, active, total

    def own_batch(rows: Any) -> Any:
        own, active, total = choose(rows)
        batch = source.gather(own if is_full else own[: tf.math.count_nonzero(own >= 0)])
        return finish(batch, active, total)

    def own_samples(rows: Any) -> Any:
        own, active, total = choose(rows)
        count = tf.where(active | is_padded, tf.math.count_nonzero(own >= 0), 1)
        own = tf.where(own >= 0, own, own[0]) if is_padded else own[:count]
        facts = tf.repeat([[int64(active), total, count]], tf.size(own), 0)
        return source.gather(own), facts

    def joined(batch: Any, facts: Any) -> Any:
        active, total, count = facts[0, 0] > 0, facts[0, 1], facts[0, 2]
        if is_padded and not is_full:
            batch = tf.nest.map_structure(lambda leaf: leaf[:count], batch)
        return finish(batch, active, total)

    groups, rows_of = _groups(tail, source.length, plan)
    if not maps:
        return groups.map(lambda group: own_batch(rows_of(group)))
    selected = groups.map(lambda group: own_samples(rows_of(group))).unbatch()
    for step in maps:
        selected = tail.apply_to_first(step, selected, plan.shard_id)
    return selected.batch(tail.batch_size).map(joined)


def _groups(tail: Tail, length: int, plan: Plan) -> tuple[tf.data.Dataset, Callable[[Any], Any]]:
    """Returns a dataset of groups, and a function that takes one and returns the numbers of its samples.

    These are a matrix with a row for each batch, filled up with -1.
    """
    size = tail.batch_size
    if tail.reorders_samples:
        samples = tail.order_samples(tf.data.Dataset.range(length))
        batches = tail.order_batches(samples.batch(size, drop_remainder=tail.drop_remainder))
        batches = pad_epochs(batches, lambda: tf.data.Dataset.from_tensors(tf.fill([size], int64(_NO_ROW))), plan)
        groups = batches.padded_batch(plan.num_shards, padded_shapes=[size], padding_values=int64(_NO_ROW))
        return groups, lambda rows: rows
    # Batches of the source's own order are known by the number of their first sample.
    end = length - length % size if tail.drop_remainder else length
    firsts = tail.order_batches(tf.data.Dataset.range(0, end, size))
    firsts = pad_epochs(firsts, lambda: tf.data.Dataset.from_tensors(int64(_NO_ROW)), plan)

    def rows_of(firsts: Any) -> Any:
        rows = firsts[:, None] + tf.range(size, dtype=tf.int64)
        return tf.where((firsts[:, None] >= 0) & (rows < end), rows, _NO_ROW)

    return firsts.batch(plan.num_shards), rows_of
