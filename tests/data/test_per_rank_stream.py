"""Streams that are different on each rank: they may end at different steps, and never yield an empty batch."""

import itertools

import pytest
import tensorflow as tf

from kdist.data.per_rank_stream import PerRankStream
from kdist.data.tf_data import StreamSource, tf_data_source
from kdist.errors import DataError
from tests.data.ranks import first_rows, one_pass, plans

Dataset = tf.data.Dataset


def stream(plan, batches, known=False):
    """A stream of `batches` batches of two that starts at 100 times the rank."""
    dataset = Dataset.range(plan.shard_id * 100, plan.shard_id * 100 + 2 * batches).batch(2)
    return tf_data_source(dataset if known else dataset.filter(lambda _: True), plan, auto_shard=False)


def test_the_shorter_stream_carries_its_last_row():
    sources = [stream(plan, batches) for plan, batches in zip(plans(2), (1, 3), strict=True)]
    assert one_pass(sources, limit=5) == [[0, 1, 100, 101], [102, 103], [104, 105], [], []]
    carried = [first_rows(shard.data) for shard in itertools.islice(sources[0].dataset(), 4)]
    assert carried == [[0, 1], [0], [0], [0]]
    assert sources[0].has_uneven_shards
    assert sources[0].num_steps is None


def test_a_stream_that_is_empty_from_the_start_carries_zeros():
    def make(rows):
        x = {"dense": tf.ones([4, 3]), "ragged": tf.ragged.constant([[1]] * 4), "sparse": tf.sparse.eye(4)}
        dataset = Dataset.from_tensor_slices((x, tf.constant(["a"] * 4))).take(rows)
        return tf_data_source(dataset.batch(2).filter(lambda *_: True), plans(2)[0], auto_shard=False)

    shard = next(iter(make(0).dataset()))
    (x, text), rows = shard.data, int(shard.rows)
    assert rows == 0
    assert x["dense"].numpy().tolist() == [[0, 0, 0]]
    assert x["ragged"].to_list() == [[]]
    assert x["sparse"].dense_shape.numpy().tolist() == [1, 4]
    assert text.numpy().tolist() == [b""]
    full = list(itertools.islice(make(4).dataset(), 3))
    assert [int(shard.rows) for shard in full] == [2, 2, 0]
    assert full[2].data[0]["ragged"].to_list() == [[1]]


@pytest.mark.parametrize("steps_per_epoch", [2, 3, 5])
def test_an_epoch_takes_each_ranks_share(steps_per_epoch):
    ranks = plans(3, steps_per_epoch=steps_per_epoch)
    sources = [stream(plan, 4) for plan in ranks]
    steps = ranks[0].job_steps_per_epoch
    epoch = one_pass(sources, limit=steps)
    assert sum(len(step) for step in epoch) == 2 * steps_per_epoch


def test_each_batch_is_taken_in_several_steps():
    (plan,) = plans(1)
    source = PerRankStream(StreamSource(Dataset.range(5).batch(4), plan), plans(3, scale_batch=False)[0], num_splits=3)
    shards = list(itertools.islice(source.dataset(), 7))
    assert [first_rows(shard.data) for shard in shards] == [[0, 1], [2], [3], [4], [4], [4], [4]]
    assert [int(shard.rows) for shard in shards] == [2, 1, 1, 1, 0, 0, 0], "no step without rows before the last one"


@pytest.mark.parametrize("steps_per_epoch", [None, 1, 2, 5])
@pytest.mark.parametrize("lengths", [(4, 4, 4), (1, 3, 2), (1, 7, 1), (6, 1, 2), (3, 0, 0)])
def test_streams_of_known_lengths_end_when_none_has_a_batch(steps_per_epoch, lengths):
    ranks = plans(3, steps_per_epoch=steps_per_epoch)
    sources = [stream(plan, length, known=True) for plan, length in zip(ranks, lengths, strict=True)]
    endless = one_pass(sources, limit=40)
    assert [source.num_own_batches for source in sources] == list(lengths)
    for source in sources:
        source.end_together(lengths)
    assert one_pass(sources) == endless[: endless.index([])]


def test_streams_that_are_all_known_to_be_empty_are_refused():
    source = stream(plans(2)[0], 0, known=True)
    with pytest.raises(DataError, match="has no samples"):
        source.end_together([0, 0])


def test_of_streams_of_which_one_is_of_unknown_length_none_is_known_to_end():
    source = stream(plans(2)[0], 3, known=True)
    source.end_together([3, None])
    assert source.num_steps is None
