"""All ranks' sources of one input, in one process."""

import itertools

import numpy as np
import tensorflow as tf

from kdist.data.sharding import Plan


def plans(num_shards, **options):
    return [Plan(num_shards=num_shards, shard_id=shard_id, **options) for shard_id in range(num_shards)]


def first_rows(data):
    """The numbers in the first leaf of a batch, one a row."""
    leaf = tf.nest.flatten(data)[0]
    leaf = tf.sparse.to_dense(leaf) if isinstance(leaf, tf.SparseTensor) else leaf
    leaf = leaf.to_tensor() if isinstance(leaf, tf.RaggedTensor) else leaf
    return np.asarray(leaf).reshape(len(leaf), -1)[:, 0].tolist()


def one_pass(sources, limit=None):
    """Draws one pass from all ranks and returns the rows that count, step by step.

    Checks what holds for every source: equal numbers of steps, one row at least, rows that sum to the total.
    """
    passes = []
    for source in sources:
        source.on_epoch_begin()
        passes.append(list(itertools.islice(source.dataset(), limit)))
        source.on_epoch_end()
    assert len({len(shards) for shards in passes}) == 1, "ranks make different numbers of steps"
    if limit is None and sources[0].num_steps is not None:
        assert len(passes[0]) == sources[0].num_steps
    steps = []
    for shards in zip(*passes, strict=True):
        rows = [int(shard.rows) for shard in shards]
        for source, shard in zip(sources, shards, strict=True):
            assert len(first_rows(shard.data)) == max(int(shard.rows), 1)
            assert int(shard.global_rows) == (sum(rows) if source.knows_global_rows else -1)
        steps.append([row for shard, count in zip(shards, rows, strict=True) for row in first_rows(shard.data)[:count]])
    return steps


def idle_rows(sources, limit=None):
    """Returns the row that each rank without data carried, by `(step, rank)`."""
    return {
        (step, rank): first_rows(shard.data)
        for rank, source in enumerate(sources)
        for step, shard in enumerate(itertools.islice(source.dataset(), limit))
        if int(shard.rows) == 0
    }


def groups(batches, num_shards, steps_per_epoch=None):
    """What the steps of a job must hold: the user's batches joined in groups that restart at each epoch."""
    epoch = steps_per_epoch or len(batches)
    joined = []
    for start in range(0, len(batches), epoch):
        part = batches[start : start + epoch]
        joined += [sum(part[at : at + num_shards], []) for at in range(0, len(part), num_shards)]
    return joined


def in_batches(num_samples, batch_size):
    return [list(range(at, min(at + batch_size, num_samples))) for at in range(0, num_samples, batch_size)]
