"""PyDataset: each rank loads its own batches, through Keras' own adapter and its workers."""

import random
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.data import sharding
from kdist.data.py_dataset import PyDatasetSource, ShardedPyDataset
from kdist.errors import DataError
from kdist.state.random_state import random_state
from kdist.trainer.feeding.source_adapter import SourceAdapter
from tests.data.ranks import first_rows, groups, idle_rows, in_batches, one_pass, plans


class Numbers(keras.utils.PyDataset):
    """Batches of consecutive numbers that are remembered when they are loaded."""

    def __init__(self, num_samples, batch_size, endless=False, **options):
        super().__init__(**options)
        self.batches = in_batches(num_samples, batch_size)
        self.endless = endless
        self.loaded = []
        self.calls = []

    @property
    def num_batches(self):
        return None if self.endless else len(self.batches)

    def __getitem__(self, index):
        self.loaded.append(index)
        rows = np.array(self.batches[index % len(self.batches)])
        return rows[:, None], rows

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")


def source(plan, dataset, **options):
    return PyDatasetSource(ShardedPyDataset(dataset, plan, **options))


def sources(ranks, *args, shuffle=False, **options):
    return [source(plan, Numbers(*args, **options), shuffle=shuffle) for plan in ranks]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_takes_a_group_of_batches(num_shards, workers):
    ranks = sources(plans(num_shards), 13, 2, workers=workers)
    assert one_pass(ranks) == groups(in_batches(13, 2), num_shards)
    assert one_pass(ranks) == groups(in_batches(13, 2), num_shards)
    assert not ranks[0].knows_global_rows


def test_the_length_of_each_epoch_counts():
    """As of a dataset that keeps the hardest samples only, or adds some."""
    datasets = [Numbers(13, 2) for _ in range(2)]
    ranks = [source(plan, dataset) for plan, dataset in zip(plans(2), datasets, strict=True)]
    for num_samples in (13, 6, 20):
        for dataset in datasets:
            dataset.batches = in_batches(num_samples, 2)
        assert one_pass(ranks, limit=20) == groups(in_batches(num_samples, 2), 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_length_counts_that_the_users_hook_has_made(workers):
    class Growing(Numbers):
        def on_epoch_begin(self):
            self.batches = in_batches(len(sum(self.batches, [])) + 3, 2)

    ranks = [source(plan, Growing(5, 2, workers=workers)) for plan in plans(2)]
    for num_samples in (8, 11, 14):
        assert one_pass(ranks, limit=20) == groups(in_batches(num_samples, 2), 2)


@pytest.mark.parametrize("num_shards", [2, 3])
def test_batches_are_split_when_the_batch_is_not_scaled(num_shards):
    ranks = sources(plans(num_shards, scale_batch=False), 7, 2)
    assert one_pass(ranks) == in_batches(7, 2)
    assert ranks[0].knows_global_rows


def test_each_rank_loads_its_own_batches_only():
    dataset = Numbers(12, 2)
    rank = source(plans(3)[1], dataset)
    dataset.loaded.clear()
    one_pass([rank])
    assert dataset.loaded == [1, 4]


@pytest.mark.parametrize("workers", [1, 2])
def test_shuffled_passes_hold_each_batch_once_in_one_order(workers):
    ranks = sources(plans(2, seed=5), 10, 2, shuffle=True, workers=workers)
    batches = in_batches(10, 2)
    for epoch in range(3):
        order = sharding.epoch_order(5, 5, epoch)
        assert one_pass(ranks) == groups([batches[batch] for batch in order], 2)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("endless", [True, False])
def test_streams_go_on_from_epoch_to_epoch(workers, endless):
    ranks = sources(plans(2, steps_per_epoch=3), 10, 2, endless=endless, workers=workers)
    iterators = [iter(rank.dataset()) for rank in ranks]
    steps = []
    for _ in range(3):
        for rank in ranks:
            rank.on_epoch_begin()
        for _ in range(2):
            shards = [next(iterator, None) for iterator in iterators]
            if None not in shards:
                steps.append([row for each in shards for row in first_rows(each.data)[: int(each.rows)]])
        for rank in ranks:
            rank.on_epoch_end()
    batches = in_batches(10, 2)
    expected = groups(batches, 2, 3)
    if endless:
        expected = groups((batches * 2)[:9], 2, 3)
    assert steps[: len(expected)] == expected
    assert ranks[0].num_steps == (None if endless else 3)


def test_a_rank_without_a_batch_carries_the_first_row_of_the_group():
    assert idle_rows(sources(plans(2), 6, 2)) == {(1, 1): [4]}


def test_calls_reach_the_users_dataset():
    dataset = Numbers(6, 2)
    one_pass([source(plans(2)[0], dataset)])
    assert dataset.calls == ["begin", "end"]


@pytest.mark.parametrize("is_for_training", [True, False])
def test_hooks_are_called_with_the_states_of_all_ranks(is_for_training):
    """Those of a training are kept, to be called again when it is resumed."""

    class Drawing(Numbers):
        def on_epoch_begin(self):
            self.calls.append(random.random())

    dataset, states = Drawing(6, 2), random_state()
    adapter = SourceAdapter(source(plans(2)[0], dataset), lambda: states, is_for_training=is_for_training)
    for _ in range(2):
        random.random()
        adapter.on_epoch_begin()
        adapter.on_epoch_end()
    assert dataset.calls[::2] == [dataset.calls[0]] * 2
    assert [name for name, _ in adapter.hooks] == ["on_epoch_begin", "on_epoch_end"] * 2 * is_for_training


class Waiting(keras.utils.PyDataset):
    """Its items are there when something else has made them."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.zeros((2, 1)), np.zeros(2)


def test_an_item_that_is_waited_for_holds_up_no_end_of_an_epoch():
    """As of a replay buffer that a callback fills when the next epoch begins."""
    made = source(plans(2)[0], Waiting())
    adapter = SourceAdapter(made, lambda: None, is_for_training=True)
    with made._sharded.loading:  # as the thread has it that reads ahead
        ended = threading.Thread(target=adapter.on_epoch_end, daemon=True)
        ended.start()
        ended.join(10)
        assert not ended.is_alive()


def test_batches_are_standardised():
    rank = source(plans(2)[1], Numbers(6, 2), standardize=lambda batch: (*batch, batch[1] * 0.5))
    shard = next(iter(rank.dataset()))
    assert shard.data[2].numpy().tolist() == [1.0, 1.5]
    assert rank.signature[2] == tf.TensorSpec([None], tf.float64)
    assert first_rows(rank.example()) == [2, 3]


def test_processes_are_warned_about(caplog):
    ShardedPyDataset(Numbers(6, 2, use_multiprocessing=True), plans(1)[0])
    assert not caplog.text
    ShardedPyDataset(Numbers(6, 2, use_multiprocessing=True), plans(2)[0])
    assert "`use_multiprocessing=True` in Numbers" in caplog.text


def test_no_batch_is_refused():
    with pytest.raises(DataError, match="The PyDataset has no samples"):
        ShardedPyDataset(Numbers(0, 2), plans(2)[0])
