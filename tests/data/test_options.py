"""The tuner of tf.data runs where it has something to choose: the end of a pass would wait for it elsewhere."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.data.arrays import ArraySource
from kdist.data.generator import GeneratorSource
from kdist.data.graphs.dataset_internals import attributes, kind, with_inputs
from kdist.data.per_rank_stream import PerRankStream
from kdist.data.py_dataset import PyDatasetSource, ShardedPyDataset
from kdist.data.tf_data import tf_data_source
from tests.data.ranks import groups, in_batches, one_pass, plans

Dataset = tf.data.Dataset
AUTOTUNE = tf.data.AUTOTUNE


def increment(x):
    return x + 1


def with_draw(x):
    return x + tf.random.uniform([], 0, 1, tf.int64)


def inner(x):
    return Dataset.from_tensors(x)


def inner_tuned(x):
    return Dataset.from_tensors(x).map(increment, num_parallel_calls=AUTOTUNE)


def rows():
    return Dataset.from_tensor_slices(np.arange(23))


NOTHING_TO_TUNE = {
    "batch": lambda: rows().batch(2),
    "shuffle.batch.prefetch": lambda: rows().shuffle(9).batch(2).prefetch(2),
    "a buffer that tunes itself": lambda: rows().batch(2).prefetch(AUTOTUNE),
    "in a function, such a buffer": lambda: rows().flat_map(lambda x: inner(x).prefetch(AUTOTUNE)).batch(2),
    "cache.repeat": lambda: rows().batch(2).cache().repeat(2),
    "map.batch": lambda: rows().map(increment).batch(2),
    "batch.map": lambda: rows().batch(2).map(increment),
    "parallel map": lambda: rows().map(increment, num_parallel_calls=2).batch(2, num_parallel_calls=2),
    "map that draws": lambda: rows().map(with_draw).filter(lambda x: x >= 0).batch(2),
    "interleave": lambda: rows().interleave(inner, num_parallel_calls=2).batch(2),
    "flat_map": lambda: rows().flat_map(inner).batch(2),
    "generator": lambda: Dataset.from_generator(lambda: range(23), output_signature=tf.TensorSpec([], tf.int64)).batch(
        2
    ),
}
SOMETHING_TO_TUNE = {
    "parallel map": lambda: rows().map(increment, num_parallel_calls=AUTOTUNE).batch(2),
    "parallel batch": lambda: rows().batch(2, num_parallel_calls=AUTOTUNE),
    "interleave": lambda: rows().interleave(inner, num_parallel_calls=AUTOTUNE, deterministic=True).batch(2),
    "in a function": lambda: rows().flat_map(inner_tuned).batch(2),
    "a map that TensorFlow makes parallel": lambda: rows().map(increment).filter(lambda x: x > 0).batch(2),
    "unknown": lambda: rows().batch(2).apply(tf.data.experimental.assert_cardinality(12)),
}


def has_tuner(make, **options):
    tuned = {tf_data_source(make(), plan).dataset().options().autotune.enabled for plan in plans(2, **options)}
    assert len(tuned) == 1
    return tuned.pop() is not False


@pytest.mark.parametrize("make", NOTHING_TO_TUNE.values(), ids=list(NOTHING_TO_TUNE))
def test_no_tuner_where_nothing_is_to_be_tuned(make):
    assert not has_tuner(make)


@pytest.mark.parametrize("make", SOMETHING_TO_TUNE.values(), ids=list(SOMETHING_TO_TUNE))
def test_a_tuner_where_something_asks_for_it(make):
    assert has_tuner(make)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_users_options_are_kept(enabled):
    options = tf.data.Options()
    options.autotune.enabled = enabled
    for make in (NOTHING_TO_TUNE["batch"], SOMETHING_TO_TUNE["parallel batch"]):
        assert has_tuner(lambda make=make: make().with_options(options)) == enabled


class Batches(keras.utils.PyDataset):
    num_batches = 8

    def __getitem__(self, index):
        return np.arange(2)


OTHERS = {
    "arrays": lambda plan: ArraySource(tf.range(23), 23, 2, plan, shuffle=True),
    "generator": lambda plan: GeneratorSource(
        lambda: iter([np.arange(2)] * 8), plan, signature=tf.TensorSpec([None], tf.int64), first=np.arange(2)
    ),
    "PyDataset": lambda plan: PyDatasetSource(ShardedPyDataset(Batches(), plan)),
    "PyDataset with workers": lambda plan: PyDatasetSource(ShardedPyDataset(Batches(workers=2), plan)),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=list(OTHERS))
def test_no_tuner_for_other_inputs(make):
    plan = plans(2)[0]
    for source in (make(plan), PerRankStream(make(plan.unsharded()), plan)):
        assert source.dataset().options().autotune.enabled is False


def test_a_buffer_tunes_itself_without_a_tuner():
    """A prefetch with AUTOTUNE begins with one element, and holds more after it was found empty."""
    made = []

    def count(x):
        made.append(int(x))
        return x

    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = Dataset.range(1000).map(lambda x: tf.numpy_function(count, [x], tf.int64))
    iterator = iter(dataset.prefetch(AUTOTUNE).with_options(options))
    for _ in range(6):
        time.sleep(0.1)  # the buffer is filled, and then found empty
        for _ in range(50):
            next(iterator)
    time.sleep(0.5)
    assert len(made) > 300 + 2


def test_a_budget_asks_for_the_tuner():
    options = tf.data.Options()
    options.autotune.ram_budget = 1 << 20
    assert has_tuner(lambda: rows().batch(2).with_options(options))


@pytest.mark.parametrize("policy", ["AUTO", "DATA", "FILE", "OFF"])
def test_no_tuner_with_any_policy(policy, tmp_path):
    for name in "ab":
        (tmp_path / name).write_text("1\n2\n")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(tf.data.experimental.AutoShardPolicy, policy)

    def make():
        files = Dataset.from_tensor_slices([str(tmp_path / name) for name in "ab"])
        return files.flat_map(tf.data.TextLineDataset).batch(2).with_options(options)

    assert not has_tuner(make)


def test_a_map_runs_in_parallel_without_a_tuner():
    def map_calls(**optimizations):
        options = tf.data.Options()
        for name, value in optimizations.items():
            setattr(options.experimental_optimization, name, value)
        source = tf_data_source(rows().map(increment).batch(2).with_options(options), plans(2)[0])
        assert source.dataset().options().autotune.enabled is False
        return [
            int(attributes(each).num_parallel_calls)
            for each in with_inputs(source.dataset())
            if kind(each) == "ParallelMap"
        ]

    assert map_calls() == [AUTOTUNE]
    assert map_calls(map_parallelization=False) == map_calls(apply_default_optimizations=False) == []


def test_batches_stay_what_they_are():
    ranks = [tf_data_source(rows().map(increment).batch(2), plan) for plan in plans(2)]
    assert one_pass(ranks) == groups([[row + 1 for row in batch] for batch in in_batches(23, 2)], 2)
