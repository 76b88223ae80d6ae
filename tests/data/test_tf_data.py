"""tf.data: all ranks together see the user's stream, in groups of batches."""

import gc
import itertools
import weakref

import numpy as np
import pytest
import tensorflow as tf

from kdist.data.per_rank_stream import PerRankStream
from kdist.data.tf_data import StreamSource, tf_data_source
from kdist.engines.arrays import fusion
from kdist.errors import DataError
from tests.data.ranks import groups, idle_rows, in_batches, one_pass, plans
from tests.helpers.pairwise import pairwise

Dataset = tf.data.Dataset


def sources(make, ranks, **options):
    return [tf_data_source(make(), plan, **options) for plan in ranks]


def hide_cardinality(dataset):
    return dataset.filter(lambda *_: True)


@pytest.mark.parametrize(("num_shards", "num_samples", "known"), pairwise([1, 2, 3, 5], [24, 23, 3], [True, False]))
def test_a_step_takes_a_group_of_batches(num_shards, num_samples, known):
    def make():
        dataset = Dataset.range(num_samples).batch(2)
        return dataset if known else hide_cardinality(dataset)

    ranks = sources(make, plans(num_shards))
    batches = in_batches(num_samples, 2)
    assert one_pass(ranks) == groups(batches, num_shards)
    assert ranks[0].num_steps == (-(-len(batches) // num_shards) if known else None)
    assert ranks[0].knows_global_rows


@pytest.mark.parametrize(("num_shards", "steps_per_epoch", "drop"), pairwise([2, 3, 5], [1, 3, 4, 20], [True, False]))
def test_groups_restart_at_each_epoch(num_shards, steps_per_epoch, drop):
    ranks = sources(
        lambda: Dataset.range(23).batch(2, drop_remainder=drop), plans(num_shards, steps_per_epoch=steps_per_epoch)
    )
    batches = in_batches(23, 2)
    assert one_pass(ranks) == groups(batches[:-1] if drop else batches, num_shards, steps_per_epoch)


@pytest.mark.parametrize("num_shards", [2, 3, 5])
def test_batches_are_split_when_the_batch_is_not_scaled(num_shards):
    ranks = sources(lambda: Dataset.range(23).batch(4), plans(num_shards, scale_batch=False, steps_per_epoch=2))
    assert one_pass(ranks) == in_batches(23, 4)


def test_a_rank_without_a_batch_carries_the_first_row_of_the_group():
    assert idle_rows(sources(lambda: Dataset.range(8).batch(2), plans(3))) == {(1, 1): [6], (1, 2): [6]}
    unscaled = sources(lambda: Dataset.range(3).batch(2), plans(2, scale_batch=False))
    assert idle_rows(unscaled) == {(1, 1): [2]}


def test_an_endless_dataset_goes_on_from_epoch_to_epoch():
    ranks = sources(lambda: Dataset.range(6).batch(2).repeat(), plans(2, steps_per_epoch=5))
    assert ranks[0].num_steps is None
    batches = list(itertools.islice(itertools.cycle(in_batches(6, 2)), 10))
    assert one_pass(ranks, limit=6) == groups(batches, 2, 5)


def test_structures_are_kept():
    def make():
        rows = np.arange(6)
        ragged = tf.ragged.constant([[row] * row for row in rows], dtype=tf.int64)
        sparse = tf.sparse.from_dense(np.eye(6))
        x = {"dense": rows[:, None], "ragged": ragged, "sparse": sparse}
        return Dataset.from_tensor_slices((x, rows)).batch(2).map(lambda x, y: (x, (y, None)))

    first, second = sources(make, plans(2))
    assert one_pass([first, second]) == [[0, 1, 2, 3], [4, 5]]
    x, (y, nothing) = next(iter(second.dataset())).data
    assert x["dense"].numpy().tolist() == [[2], [3]]
    assert x["ragged"].to_list() == [[2, 2], [3, 3, 3]]
    assert (tf.sparse.to_dense(x["sparse"]).numpy() == np.eye(6)[2:4]).all()
    assert nothing is None
    assert y.numpy().tolist() == [2, 3]
    idle = list(second.dataset())[1].data[0]
    assert idle["ragged"].to_list() == [[4] * 4]
    assert (tf.sparse.to_dense(idle["sparse"]).numpy() == np.eye(6)[4:5]).all()
    assert first.signature[0]["dense"] == tf.TensorSpec([None, 1], tf.int64)
    split = sources(make, plans(2, scale_batch=False))[1]
    assert next(iter(split.dataset())).data[0]["ragged"].to_list() == [[1]]


class Calls:
    """Counts how often a `map` runs."""

    def __init__(self):
        self.seen = []

    def __call__(self, batch):
        def work(batch):
            self.seen.append(int(batch[0]))
            return batch

        result = tf.numpy_function(work, [batch], tf.int64)
        result.set_shape(batch.shape)
        return result


@pytest.mark.parametrize("parallel", [None, 2])
def test_an_expensive_map_runs_for_own_batches_only(parallel):
    calls = [Calls(), Calls()]

    def make(work):
        return Dataset.range(20).batch(2).map(work, num_parallel_calls=parallel).map(lambda x: x + 0).prefetch(1)

    ranks = [tf_data_source(make(work), plan) for work, plan in zip(calls, plans(2), strict=True)]
    assert not ranks[0].knows_global_rows
    assert one_pass(ranks) == groups(in_batches(20, 2), 2)
    assert sorted(calls[0].seen) == [0, 4, 8, 12, 16]
    assert sorted(calls[1].seen) == [2, 6, 10, 14, 18]


@pytest.mark.parametrize(("num_shards", "steps_per_epoch", "drop"), pairwise([2, 3], [None, 6], [True, False]))
def test_an_expensive_map_of_samples_runs_for_own_samples_only(num_shards, steps_per_epoch, drop):
    calls = [Calls() for _ in range(num_shards)]

    def make(work):
        dataset = Dataset.range(23).map(lambda x: x[None]).map(work, num_parallel_calls=2)
        return dataset.batch(2, drop_remainder=drop).prefetch(1)

    ranks = plans(num_shards, steps_per_epoch=steps_per_epoch)
    made = [tf_data_source(make(work), plan) for work, plan in zip(calls, ranks, strict=True)]
    batches = in_batches(23, 2)[: -1 if drop else None]
    assert one_pass(made) == groups(batches, num_shards, steps_per_epoch)
    assert made[0].knows_global_rows
    mapped = [[row for batch in batches[rank::num_shards] for row in batch] for rank in range(num_shards)]
    if len(batches) % num_shards:
        mapped[-1].append(batches[-(len(batches) % num_shards)][0])
    assert [sorted(work.seen) for work in calls[:1] + calls[-1:]] == [mapped[0], sorted(mapped[-1])]


@pytest.mark.parametrize(("num_shards", "steps_per_epoch", "drop"), pairwise([2, 3], [None, 4, 5], [True, False]))
def test_maps_of_samples_and_of_batches(num_shards, steps_per_epoch, drop):
    def make():
        dataset = Dataset.range(23).shuffle(23, seed=1).map(lambda x: {"a": x, "b": (x, x * 2)})
        dataset = dataset.map(lambda e: (e["a"], e["b"][1])).batch(2, drop_remainder=drop, num_parallel_calls=2)
        return dataset.map(lambda x, y: {"x": x, "y": y - x})

    plain = [batch["x"].numpy().tolist() for batch in make()]
    made = sources(make, plans(num_shards, steps_per_epoch=steps_per_epoch))
    assert one_pass(made) == groups(plain, num_shards, steps_per_epoch)
    assert made[0].knows_global_rows == drop
    shard = next(iter(made[0].dataset()))
    assert (shard.data["x"] == shard.data["y"]).numpy().all()


def test_the_rows_of_a_mapped_batch_are_known_if_they_are_static():
    ranks = sources(lambda: Dataset.range(20).batch(2, drop_remainder=True).map(lambda x: x), plans(3))
    assert ranks[0].knows_global_rows
    assert one_pass(ranks) == groups(in_batches(20, 2), 3)


def test_a_map_that_makes_batches_of_numbers():
    ranks = sources(lambda: Dataset.range(5).map(lambda i: tf.repeat(i, i + 1)), plans(2))
    assert one_pass(ranks) == [[0, 1, 1], [2, 2, 2, 3, 3, 3, 3], [4] * 5]


@pytest.mark.parametrize("scale_batch", [True, False])
def test_an_unseeded_shuffle_follows_one_order(scale_batch):
    tf.random.set_seed(None)  # a test before may have set one

    def make():
        return Dataset.range(20).shuffle(20).batch(3).map(lambda x: x).prefetch(1)

    ranks = sources(make, plans(3, scale_batch=scale_batch))
    first, second = sum(one_pass(ranks), []), sum(one_pass(ranks), [])
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def with_policy(dataset, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


@pytest.mark.parametrize("policy", ["AUTO", "DATA"])
def test_policies_that_share_out_batches(policy):
    policy = tf.data.experimental.AutoShardPolicy[policy]
    ranks = sources(lambda: with_policy(Dataset.range(9).batch(2), policy), plans(2))
    assert one_pass(ranks) == groups(in_batches(9, 2), 2)


@pytest.mark.parametrize("off", [True, False])
def test_a_stream_that_is_the_ranks_own_is_left_alone(off):
    def make(plan):
        dataset = Dataset.range(plan.shard_id * 10, plan.shard_id * 10 + 3 + 2 * plan.shard_id).batch(2)
        return with_policy(dataset, tf.data.experimental.AutoShardPolicy.OFF) if off else dataset

    ranks = [tf_data_source(make(plan), plan, auto_shard=off) for plan in plans(2)]
    assert all(isinstance(source, PerRankStream) for source in ranks)
    assert one_pass(ranks, limit=5) == [[0, 1, 10, 11], [2, 12, 13], [14], [], []]


def files_of_numbers(folder, num_files):
    for file in range(num_files):
        folder.joinpath(f"{file}.txt").write_text("".join(f"{file * 10 + row}\n" for row in range(3)))
    return lambda: with_policy(
        Dataset.list_files(str(folder / "*.txt"))
        .interleave(tf.data.TextLineDataset)
        .map(lambda line: tf.strings.to_number(line, tf.int64))
        .batch(2),
        tf.data.experimental.AutoShardPolicy.FILE,
    )


@pytest.mark.parametrize("scale_batch", [True, False])
def test_files_are_shared_out(tmp_path, scale_batch):
    ranks = sources(files_of_numbers(tmp_path, 4), plans(2, scale_batch=scale_batch))
    steps = one_pass(ranks, limit=8)
    assert sorted(sum(steps, [])) == [file * 10 + row for file in range(4) for row in range(3)]
    assert all(len(step) <= (4 if scale_batch else 2) for step in steps)
    assert steps[-1] == []


def test_hints_are_followed():
    hint = tf.data.experimental.SHARD_HINT
    ranks = sources(
        lambda: with_policy(Dataset.range(6).shard(hint, hint).batch(2), tf.data.experimental.AutoShardPolicy.HINT),
        plans(2),
    )
    assert one_pass(ranks, limit=3) == [[0, 2, 1, 3], [4, 5], []]


def test_a_tuple_of_one_stays_a_tuple():
    for scale_batch in (True, False):
        source = sources(lambda: Dataset.range(4).batch(2).map(lambda x: (x,)), plans(2, scale_batch=scale_batch))[1]
        assert isinstance(next(iter(source.dataset())).data, tuple)


def test_an_example_is_not_lost():
    ranks = sources(lambda: Dataset.range(4).batch(2), plans(2))
    assert ranks[1].example().numpy().tolist() == [0, 1]
    assert one_pass(ranks) == [[0, 1, 2, 3]]


def test_an_empty_dataset_is_refused():
    with pytest.raises(DataError, match="has no samples"):
        tf_data_source(Dataset.range(0).batch(2), plans(2)[0])


def test_a_second_call_takes_the_pipeline_of_the_first():
    def orders(dataset):
        passes = []
        for seed in (1, 2):
            ranks = sources(lambda: dataset, plans(2, seed=seed))
            passes.append(([rank.dataset() for rank in ranks], one_pass(ranks)))
        (first, one), (second, other) = passes
        return [a is b for a, b in zip(first, second, strict=True)], one, other

    kept, one, other = orders(Dataset.range(23).map(lambda x: x + 1).batch(2))
    assert kept == [True, True]
    assert one == other == groups([[row + 1 for row in batch] for batch in in_batches(23, 2)], 2)
    kept, one, other = orders(Dataset.range(23).shuffle(23).batch(2))
    assert kept == [False, False]
    assert one != other


def _augmented(row):
    return row * 2, row


@pytest.mark.parametrize(
    ("make", "is_kept"),
    [
        (lambda: Dataset.range(23).shuffle(9).batch(2), True),
        (lambda: Dataset.range(23).shuffle(9).map(_augmented, num_parallel_calls=2).batch(2).prefetch(1), True),
        (lambda: Dataset.range(23).map(_augmented).batch(2).shuffle(3), True),
        (lambda: Dataset.range(23).shuffle(9).shuffle(5).repeat(2).batch(2, num_parallel_calls=2), True),
        (lambda: Dataset.range(23).shuffle(9, reshuffle_each_iteration=False).padded_batch(2), True),
        (lambda: hide_cardinality(Dataset.range(23)).shuffle(9).batch(2, drop_remainder=True), True),
        (lambda: Dataset.range(23).cache().shuffle(9).batch(2), True),
        (lambda: Dataset.range(23).shuffle(9).cache().batch(2), False),
        (lambda: Dataset.range(4).interleave(lambda _: Dataset.range(5).shuffle(5)).shuffle(4).batch(2), False),
    ],
)
@pytest.mark.parametrize("scale_batch", [True, False])
def test_a_second_call_has_the_order_of_its_seed_without_a_trace(make, is_kept, scale_batch, monkeypatch):
    def passes(dataset, seed):
        ranks = sources(lambda: dataset, plans(2, seed=seed, scale_batch=scale_batch))
        return [one_pass(ranks) for _ in range(2)]

    dataset = make()
    first, other = passes(dataset, 1), passes(make(), 2)
    traced = []
    monkeypatch.setattr(
        StreamSource,
        "_build",
        lambda self, *args, build=StreamSource._build: (
            traced.append(1),
            build(self, *args),
        )[1],
    )
    assert passes(dataset, 2) == other
    assert passes(dataset, 1) == first
    assert not traced or not is_kept


def test_a_dataset_is_let_go_with_the_pipeline_that_it_keeps():
    rows = fusion.empty(1 << 20, np.float32).reshape(-1, 8)
    memory = weakref.ref(rows)
    dataset = Dataset.from_tensor_slices(tf.experimental.dlpack.from_dlpack(rows.__dlpack__())).batch(64)
    for source in [tf_data_source(dataset, plan) for plan in plans(2)]:
        next(iter(source.dataset()))
    assert memory() is not None
    del rows, dataset, source
    gc.collect()
    assert memory() is None
