"""Generators: every rank reads every batch and keeps its own."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from kdist.data.generator import GeneratorSource, shard_batches
from kdist.errors import DataError
from tests.data.ranks import first_rows, groups, idle_rows, in_batches, one_pass, plans


def batches_of(num_samples, batch_size):
    for batch in in_batches(num_samples, batch_size):
        rows = np.array(batch)
        yield ({"x": rows[:, None], "z": [rows * 2]}, rows * 3, None)


SIGNATURE = (
    {"x": tf.TensorSpec([None, 1], tf.int64), "z": [tf.TensorSpec([None], tf.int64)]},
    tf.TensorSpec([None], tf.int64),
    tf.OptionalSpec(None),
)


def source(plan, num_samples=23, batch_size=2, **options):
    def batches():
        return batches_of(num_samples, batch_size)

    return GeneratorSource(batches, plan, signature=SIGNATURE, first=next(batches(), None), **options)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
@pytest.mark.parametrize("steps_per_epoch", [None, 3, 4])
def test_a_step_takes_a_group_of_batches(num_shards, steps_per_epoch):
    ranks = [source(plan) for plan in plans(num_shards, steps_per_epoch=steps_per_epoch)]
    assert one_pass(ranks) == groups(in_batches(23, 2), num_shards, steps_per_epoch)
    assert ranks[0].num_steps is None


@pytest.mark.parametrize("num_shards", [2, 3])
def test_batches_are_split_when_the_batch_is_not_scaled(num_shards):
    ranks = [source(plan, 7, 2, num_batches=4) for plan in plans(num_shards, scale_batch=False)]
    assert one_pass(ranks) == in_batches(7, 2)
    assert ranks[0].num_steps == 4


def test_a_rank_without_a_batch_carries_the_first_row_of_the_group():
    assert idle_rows([source(plan, 6, 2) for plan in plans(2)]) == {(1, 1): [4]}


def test_structures_and_none_are_kept():
    second = source(plans(2)[1])
    x, y, weight = next(iter(second.dataset())).data
    assert x["x"].numpy().tolist() == [[2], [3]]
    assert x["z"][0].numpy().tolist() == [4, 6]
    assert y.numpy().tolist() == [6, 9]
    assert weight is None
    assert second.signature[0]["x"] == tf.TensorSpec([None, 1], tf.int64)
    assert first_rows(second.example()) == [0, 1]


def test_an_endless_generator_is_read_only_as_far_as_needed():
    read = []

    def endless():
        for number in itertools.count():
            read.append(number)
            yield (np.array([number]),)

    shards = shard_batches(endless(), plans(2, steps_per_epoch=3)[1])
    got = [(int(data[0][0]), rows, total) for data, rows, total in itertools.islice(shards, 4)]
    assert got == [(1, 1, 2), (2, 0, 1), (4, 1, 2), (5, 0, 1)]
    assert read == [0, 1, 2, 3, 4, 5]


def test_no_batch_is_refused():
    with pytest.raises(DataError, match="The generator has no samples"):
        source(plans(2)[0], 0)
