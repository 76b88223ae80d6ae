"""Arrays: all ranks together see what one process would, in the same steps."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from kdist.data import arrays, sharding
from kdist.data.arrays import ArraySource
from kdist.engines.arrays import fusion
from kdist.errors import DataError
from tests.data.ranks import groups, idle_rows, in_batches, one_pass, plans


def sources(num_samples, batch_size, ranks, **options):
    x = tf.range(num_samples)[:, None] * tf.ones([1, 3], tf.int32)
    return [ArraySource((x, x + 1), num_samples, batch_size, plan, **options) for plan in ranks]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
@pytest.mark.parametrize(("num_samples", "batch_size"), [(48, 4), (50, 4), (7, 2), (3, 4), (1, 1)])
def test_steps_are_those_of_one_process_with_the_global_batch(num_shards, num_samples, batch_size):
    steps = one_pass(sources(num_samples, batch_size, plans(num_shards)))
    assert steps == in_batches(num_samples, batch_size * num_shards)


@pytest.mark.parametrize("num_shards", [2, 3])
@pytest.mark.parametrize(("num_samples", "batch_size"), [(48, 4), (50, 4), (5, 2), (4, 1)])
def test_batches_are_split_when_the_batch_is_not_scaled(num_shards, num_samples, batch_size):
    steps = one_pass(sources(num_samples, batch_size, plans(num_shards, scale_batch=False)))
    assert steps == in_batches(num_samples, batch_size)


@pytest.mark.parametrize("steps_per_epoch", [1, 3, 4, 30])
def test_groups_restart_at_each_epoch(steps_per_epoch):
    steps = one_pass(sources(50, 4, plans(3, steps_per_epoch=steps_per_epoch)))
    assert steps == groups(in_batches(50, 4), 3, steps_per_epoch)


def test_a_rank_without_rows_carries_the_first_of_the_step():
    assert idle_rows(sources(9, 2, plans(4))) == {(1, 1): [8], (1, 2): [8], (1, 3): [8]}


@pytest.mark.parametrize("steps_per_epoch", [None, 4])
def test_shuffled_epochs_hold_each_sample_once_in_one_order(steps_per_epoch):
    ranks = sources(50, 4, plans(3, seed=5, steps_per_epoch=steps_per_epoch), shuffle=True)
    first = sum(one_pass(ranks), [])
    assert first == sharding.epoch_order(50, 5, 0).tolist()
    assert sum(one_pass(ranks), []) == sharding.epoch_order(50, 5, 1).tolist()


def test_batchwise_shuffle_keeps_each_step():
    steps = one_pass(sources(50, 4, plans(3), shuffle="batch"))
    assert [sorted(step) for step in steps] == in_batches(50, 12)
    assert steps != in_batches(50, 12)


def test_structures_are_kept():
    rows = np.arange(10)
    inputs = ({"a": tf.constant(rows), "b": [tf.constant(rows * 2), None]}, tf.constant(rows * 3), None)
    (source,) = (ArraySource(inputs, 10, 5, plan) for plan in plans(2)[1:])
    (shard,) = source.dataset()
    x, y, weight = shard.data
    assert x["a"].numpy().tolist() == [5, 6, 7, 8, 9]
    assert x["b"][0].numpy().tolist() == [10, 12, 14, 16, 18]
    assert x["b"][1] is None
    assert weight is None
    assert y.numpy().tolist() == [15, 18, 21, 24, 27]
    assert source.signature[0]["a"] == tf.TensorSpec([None], tf.int64)


def test_sparse_and_ragged_rows():
    dense = np.array([[1, 0, 2], [0, 0, 0], [0, 3, 0], [4, 5, 6], [7, 0, 0]], np.float32)
    ragged = tf.ragged.constant([[1], [], [2, 3], [4, 5, 6], [7]])
    ranks = [ArraySource((tf.sparse.from_dense(dense), ragged), 5, 2, plan, shuffle=True) for plan in plans(2, seed=3)]
    order = sharding.epoch_order(5, 3, 0)
    got = [[(tf.sparse.to_dense(s.data[0]).numpy(), s.data[1].to_list()) for s in source.dataset()] for source in ranks]
    first_step = np.concatenate([got[0][0][0], got[1][0][0]])
    assert (first_step == dense[order[:4]]).all()
    assert got[0][0][1] + got[1][0][1] == [ragged[int(row)].numpy().tolist() for row in order[:4]]
    assert ranks[0].signature[0].shape.as_list() == [None, 3]


def test_a_gather_of_the_callers():
    source = ArraySource(None, 6, 2, plans(3)[1], gather=lambda rows: {"twice": rows * 2})
    (shard,) = source.dataset()
    assert shard.data["twice"].numpy().tolist() == [4, 6]


def test_full_steps_have_a_static_batch_size():
    source = sources(48, 4, plans(2))[0]
    assert source.dataset().element_spec.data[0].shape.as_list() == [4, 3]
    assert source.signature[0].shape.as_list() == [None, 3]
    assert int(source.dataset().cardinality()) == source.num_steps == 6


def test_one_batch_in_one_order_needs_no_trace(monkeypatch):
    """A loop of `predict` on one row spends its time on nothing else."""

    def traced(*_: object) -> None:
        raise AssertionError("a function is traced")

    monkeypatch.setattr(tf.data.Dataset, "map", traced)
    monkeypatch.setattr(tf.data.Dataset, "flat_map", traced)
    for num_samples in (1, 8):
        assert one_pass(sources(num_samples, 4, plans(2))) == in_batches(num_samples, 8)


def test_no_samples():
    with pytest.raises(DataError, match="have no samples"):
        sources(0, 4, plans(2))


def test_a_source_is_let_go_with_its_arrays():
    (source,) = sources(12, 2, plans(1))
    assert len(list(source.dataset())) == source.num_steps
    watched = weakref.ref(source)
    del source
    assert watched() is None


def test_functions_are_traced_once_for_arrays_of_one_kind(monkeypatch):
    assert one_pass(sources(48, 4, plans(2))) == in_batches(48, 8)

    def traced(*_: object) -> None:
        raise AssertionError("a function is traced")

    monkeypatch.setattr(arrays, "_traced", traced)
    monkeypatch.setattr(tf.data.Dataset, "map", traced)
    assert one_pass(sources(64, 4, plans(2))) == in_batches(64, 8)


def test_memory_is_let_go_with_its_source():
    rows = fusion.empty(1 << 20, np.float32).reshape(-1, 8)
    memory = weakref.ref(rows)
    source = ArraySource(
        tf.experimental.dlpack.from_dlpack(rows.__dlpack__()), len(rows), 64, plans(2)[0], shuffle=True
    )
    assert len(list(source.dataset())) == source.num_steps
    assert memory() is not None
    del rows, source
    gc.collect()
    assert memory() is None
