"""The choice of a rank's rows, moved towards the source: the same samples in the same order, and no others read."""

import collections
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.data.graphs.dataset_internals import kind, with_inputs
from kdist.data.pipelines.pipeline import Pipeline
from kdist.data.pipelines.tail import is_map, tail_of
from kdist.data.sharding import Plan, split_rows
from kdist.data.tf_data import tf_data_source
from tests.data.ranks import groups, one_pass, plans

Dataset = tf.data.Dataset


def slices(num_samples=23):
    rows = np.arange(num_samples)
    return Dataset.from_tensor_slices({"x": rows, "y": rows * 2})


SLICES = slices


def zipped(rows, numbers):
    """Nested, one of them in a dictionary."""
    both = Dataset.zip({"row": rows, "others": (numbers, numbers)})
    return both.map(lambda each: {"x": each["row"]["x"], "y": each["others"][1] * 3})


def twice(row):
    return {"x": row["x"], "y": row["y"] * 2}


def small(row):
    return {"x": tf.cast(row["x"], tf.int32), "y": row["y"]}


def cut(batch):
    """Changes the number of rows."""
    return {name: leaf[:1] for name, leaf in batch.items()}


# Pipelines that are followed on numbers, with batches of two.
NUMBERED = {
    "batch": lambda: slices().batch(2),
    "drop": lambda: slices().batch(2, drop_remainder=True),
    "range": lambda: Dataset.range(3, 70, 3).batch(2).map(lambda x: x + 1),
    "shuffle": lambda: slices().shuffle(7, seed=1).batch(2).prefetch(1),
    "batch.map": lambda: slices().batch(2).map(twice),
    "batch.cut": lambda: slices().batch(2).map(cut),
    "drop.map": lambda: slices().batch(2, drop_remainder=True).map(twice, num_parallel_calls=2),
    "map.batch": lambda: slices().map(twice).batch(2),
    "map.drop.map": lambda: slices().map(twice).batch(2, drop_remainder=True).map(small),
    "map.shuffle.map.batch.map": lambda: slices().map(twice).shuffle(9, seed=1).map(small).batch(2).map(twice),
    "cache": lambda: slices().cache().prefetch(1).shuffle(9, seed=1).map(twice).batch(2),
    "batch.cache.repeat": lambda: slices().batch(2).cache().repeat(2).prefetch(2),
    "shuffle.repeat.batch": lambda: slices().shuffle(9, seed=1).repeat(2).map(twice).batch(2),
    "map.batch.repeat": lambda: slices().map(twice).batch(2).repeat(2),
    "map.drop.map.repeat": lambda: slices().map(twice).batch(2, drop_remainder=True).map(small).repeat(2),
    "shuffled batches": lambda: slices().batch(2).map(twice).shuffle(4, seed=1).map(small).skip(1).take(9),
    "map.shuffled batches": lambda: slices().map(twice).batch(2).shuffle(4, seed=1).skip(1).take(9),
    "zip": lambda: zipped(slices(), Dataset.range(100)).batch(2),
    "zip.shuffle.map": lambda: zipped(slices(40).prefetch(1), Dataset.range(29)).shuffle(7, seed=1).map(twice).batch(2),
    "skip.take": lambda: slices().skip(3).map(twice).take(15).batch(2),
}


def batches_of(dataset):
    first = [batch["x"] if isinstance(batch, dict) else batch for batch in dataset]
    return [batch.numpy().tolist() for batch in first]


def kinds_in(dataset):
    return {kind(each) for each in with_inputs(dataset)}


@pytest.mark.parametrize(
    ("name", "num_shards", "steps_per_epoch"),
    [(name, *plan) for name, plan in zip(NUMBERED, itertools.cycle([(2, None), (3, 6), (4, 5)]), strict=False)],
)
def test_numbers_are_followed_instead_of_samples(name, num_shards, steps_per_epoch):
    make = NUMBERED[name]
    plain = make()
    ranks = [tf_data_source(make(), plan) for plan in plans(num_shards, steps_per_epoch=steps_per_epoch)]
    assert "TensorSlice" not in kinds_in(ranks[0].dataset())
    for _ in range(2):
        assert one_pass(ranks) == groups(batches_of(plain), num_shards, steps_per_epoch)
    for shard in itertools.chain.from_iterable(source.dataset() for source in ranks):
        if isinstance(shard.data, dict):
            factors = shard.data["y"].numpy() / np.maximum(np.asarray(shard.data["x"]), 1)
            assert len(set(factors[np.asarray(shard.data["x"]) > 0])) <= 1, "the parts of a sample belong together"


@pytest.mark.parametrize(
    ("name", "num_shards", "steps_per_epoch"),
    [
        ("map.batch", 2, 5),
        ("map.drop.map", 3, None),
        ("map.batch.repeat", 4, 6),
        ("map.drop.map.repeat", 3, 4),
        ("map.shuffle.map.batch.map", 2, None),
        ("map.shuffled batches", 2, None),
    ],
)
def test_samples_without_numbers_are_followed_as_well(monkeypatch, name, num_shards, steps_per_epoch):
    """As those of files: what comes before the batches, and what orders them, is the same."""
    monkeypatch.setitem(globals(), "slices", lambda *size: SLICES(*size).filter(lambda _: True))
    plain = NUMBERED[name]()
    ranks = [tf_data_source(NUMBERED[name](), plan) for plan in plans(num_shards, steps_per_epoch=steps_per_epoch)]
    for _ in range(2):
        assert one_pass(ranks) == groups(batches_of(plain), num_shards, steps_per_epoch)


# Ranks take rows of one batch, or of several: the plan's options, and the number of ranks.
SPLITS = [
    (2, {"scale_batch": False}),
    (3, {"scale_batch": False, "steps_per_epoch": 4}),
    (2, {"micro_batches": 4, "steps_per_epoch": 6}),
    (3, {"micro_batches": 4}),
    (3, {"micro_batches": 2, "steps_per_epoch": 5}),
    (1, {"micro_batches": 3}),
]


def slices_of(steps, num_shards):
    """What each rank has of each step where rows are split."""
    bounds = [[split_rows(len(rows), num_shards, rank) for rank in range(num_shards)] for rows in steps]
    return [[rows[start:stop] for start, stop in each] for rows, each in zip(steps, bounds, strict=True)]


def own_rows(sources):
    """What each rank has of each step of a pass."""
    passes = [
        [np.asarray(tf.nest.flatten(shard.data)[0])[: int(shard.rows)].tolist() for shard in source.dataset()]
        for source in sources
    ]
    return [list(shares) for shares in zip(*passes, strict=True)]


@pytest.mark.parametrize(
    ("numbered", "name", "num_shards", "options"),
    [
        *((True, name, *split) for name, split in zip(NUMBERED, itertools.cycle(SPLITS), strict=False)),
        (False, "map.batch", *SPLITS[1]),
        (False, "map.batch.repeat", *SPLITS[2]),
        (False, "shuffle.repeat.batch", *SPLITS[3]),
        (False, "map.shuffled batches", *SPLITS[4]),
        (False, "map.shuffle.map.batch.map", *SPLITS[0]),
    ],
)
def test_rows_of_batches_are_split(monkeypatch, numbered, name, num_shards, options):
    if not numbered:
        monkeypatch.setitem(globals(), "slices", lambda *size: SLICES(*size).filter(lambda _: True))
    plain = NUMBERED[name]()
    ranks = [tf_data_source(NUMBERED[name](), plan) for plan in plans(num_shards, **options)]
    number, epoch = options.get("micro_batches", 1), options.get("steps_per_epoch")
    assert own_rows(ranks) == slices_of(groups(batches_of(plain), number, epoch), num_shards)
    assert one_pass(ranks) == groups(batches_of(plain), number, epoch)  # a second pass
    maps_batches = any(is_map(step) for step in tail_of(Pipeline(plain, 0), Plan(), static=False).batch_maps)
    if numbered and not maps_batches:
        assert "TensorSlice" not in kinds_in(ranks[0].dataset())


@pytest.mark.parametrize(
    "make",
    [
        lambda: slices().shuffle(9).map(twice).batch(2),
        lambda: slices().cache().map(twice).shuffle(9).batch(2).shuffle(3),
        lambda: slices().shuffle(23, reshuffle_each_iteration=False).skip(4).batch(2),
    ],
)
def test_unseeded_shuffles_have_the_order_of_the_whole_pipeline(make):
    tf.random.set_seed(None)  # a test before may have set one
    whole = Pipeline(make(), seed=7).dataset()
    ranks = [tf_data_source(make(), plan) for plan in plans(2, seed=7)]
    assert not any("TensorSlice" in kinds_in(source.dataset()) for source in ranks)
    for _ in range(2):
        assert one_pass(ranks) == groups(batches_of(whole), 2)


class Reads:
    """Counts what a source, which only computes from its argument, is asked for."""

    def __init__(self):
        self.seen = []

    def __call__(self, number):
        def read(number):
            self.seen.append(int(number))
            return number

        row = tf.numpy_function(read, [number], tf.int64, stateful=False)
        row.set_shape([])
        return row


READ = {
    "shuffled": lambda read: Dataset.range(24).map(read).shuffle(7, seed=1).batch(2),
    "repeated": lambda read: Dataset.range(24).map(read).batch(2).repeat(2),
    "repeated samples": lambda read: Dataset.range(24).shuffle(7, seed=1).map(read).repeat(2).batch(2),
    "not numbered": lambda read: unnumbered().map(read).shuffle(7, seed=1).batch(2),
    "not numbered, repeated": lambda read: unnumbered().map(read).batch(2).repeat(2),
    "not numbered, taken": lambda read: unnumbered().map(read).batch(2).skip(3).take(6),
    "not numbered, shuffled batches": lambda read: unnumbered().map(read).batch(2).shuffle(4, seed=1).prefetch(1),
    "not numbered, maps of full batches": lambda read: (
        unnumbered().map(read).batch(2, drop_remainder=True).map(lambda x: x + 0)
    ),
}


def unnumbered():
    return Dataset.range(24).filter(lambda _: True)


@pytest.mark.parametrize(("name", "num_shards"), zip(READ, itertools.cycle([2, 3]), strict=False))
def test_a_rank_asks_the_source_for_its_own_rows_only(name, num_shards):
    reads = [Reads() for _ in range(num_shards)]
    ranks = [tf_data_source(READ[name](read), plan) for read, plan in zip(reads, plans(num_shards), strict=True)]
    own = [[] for _ in ranks]
    for rows, source in zip(own, ranks, strict=True):
        for shard in source.dataset():
            rows += shard.data.numpy().tolist()
    assert [collections.Counter(read.seen) for read in reads] == [collections.Counter(rows) for rows in own]
    assert sum(len(rows) for rows in own) == sum(len(batch) for batch in READ[name](lambda x: x))


@pytest.mark.parametrize(
    ("name", "num_shards", "options"),
    [
        (name, *split)
        for name, split in zip(
            [name for name in READ if "maps of full batches" not in name],
            itertools.cycle([(3, {"micro_batches": 6}), (2, {"scale_batch": False})]),
            strict=False,
        )
    ],
)
def test_a_rank_asks_the_source_for_its_rows_of_a_batch_only(name, num_shards, options):
    reads = [Reads() for _ in range(num_shards)]
    all_plans = plans(num_shards, **options)
    ranks = [tf_data_source(READ[name](read), plan) for read, plan in zip(reads, all_plans, strict=True)]
    steps = groups(batches_of(READ[name](lambda x: x)), options.get("micro_batches", 1))
    own = own_rows(ranks)
    assert own == slices_of(steps, num_shards)
    for rank, read in enumerate(reads):
        assert collections.Counter(read.seen) == collections.Counter(row for step in own for row in step[rank])


@pytest.mark.parametrize("make", [lambda: Dataset.range(24), lambda: unnumbered()])
@pytest.mark.parametrize(("drop", "options"), [(True, {"scale_batch": False}), (False, {"micro_batches": 2})])
def test_a_rank_parses_no_more_than_the_largest_share_of_a_step(make, drop, options):
    """Where rows do not divide by the ranks, a rank with fewer parses one twice."""
    for plan in plans(3, **options):
        read = Reads()
        source = tf_data_source(make().map(read).batch(4, drop_remainder=drop).repeat(2), plan)
        num_steps = len(list(source.dataset()))
        assert len(read.seen) == plan.most_rows(4) * num_steps


def test_maps_of_batches_and_maps_with_a_state_run_for_all_rows_where_rows_are_split():
    def state(row):
        read = tf.numpy_function(lambda row: seen.append(int(row)) or row, [row], tf.int64)
        return tf.ensure_shape(read, [])

    for make, options in (
        (lambda: unnumbered().map(state).batch(4), {"scale_batch": False}),
        (lambda: Dataset.range(24).map(state).batch(4).prefetch(1), {"micro_batches": 3}),
        (lambda: Dataset.range(24).map(state).batch(4).map(lambda x: x + 0 * tf.reduce_max(x)), {"micro_batches": 3}),
        (lambda: unnumbered().map(state).batch(4).map(lambda x: x + 0 * tf.reduce_max(x)), {"scale_batch": False}),
    ):
        for plan in plans(2, **options):
            seen = []
            assert len(list(tf_data_source(make(), plan).dataset())) == 6 // plan.group_size
            assert seen == list(range(24))


def test_a_batch_of_rows_of_other_shapes_is_refused_where_it_is_split():
    """As in one process, although the rows of each rank have one shape."""
    source = Dataset.range(8).map(lambda number: tf.ones([number // 2 % 2 + 1])).batch(4)
    for plan in plans(2, scale_batch=False):
        with pytest.raises(tf.errors.InvalidArgumentError, match="Cannot add tensor to the batch"):
            list(tf_data_source(source, plan).dataset())


def test_rows_of_other_shapes_are_not_joined():
    def make():
        rows = Dataset.range(12).map(lambda x: tf.repeat(x, x // 4 + 1))
        return rows.batch(2)

    joined = tf_data_source(make(), plans(2, micro_batches=4)[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="batches of a step cannot be joined"):
        list(joined.dataset())
    ranks = [tf_data_source(make(), plan) for plan in plans(2, scale_batch=False)]
    assert one_pass(ranks) == [[row, row + 1] for row in range(0, 12, 2)]


@pytest.mark.parametrize("drop", [True, False])
def test_a_rank_parses_no_more_than_a_batch_a_step_where_epochs_end_within_a_group(drop):
    for plan in plans(3, steps_per_epoch=4):
        read = Reads()
        source = tf_data_source(unnumbered().map(read).batch(2, drop_remainder=drop).repeat(3), plan)
        num_steps = len(list(source.dataset()))
        assert num_steps == 18
        assert len(read.seen) == 2 * num_steps


@pytest.mark.parametrize("make", [unnumbered, lambda: Dataset.range(24)])
def test_a_map_of_batches_sees_a_whole_one_on_a_rank_without_a_batch(make):
    made = [make().take(20).map(lambda x: x + 1).batch(4).map(lambda x: tf.ensure_shape(x, [4])) for _ in range(2)]
    ranks = [tf_data_source(each, plan) for each, plan in zip(made, plans(2), strict=True)]
    last = [list(source.dataset())[-1] for source in ranks]
    assert [int(shard.rows) for shard in last] == [4, 0]


def test_images_of_a_directory_are_decoded_for_own_batches_only(tmp_path):
    for number in range(11):
        folder = tmp_path / f"class {number % 2}"
        folder.mkdir(exist_ok=True)
        image = tf.fill([4, 4, 3], tf.cast(10 * number, tf.uint8))
        tf.io.write_file(str(folder / f"{number}.png"), tf.io.encode_png(image))

    def make():
        options = {"label_mode": "binary", "image_size": (4, 4), "batch_size": 2, "seed": 1}
        return keras.utils.image_dataset_from_directory(tmp_path, **options, verbose=False).repeat(2)

    expected = [images[:, 0, 0, 0].numpy().tolist() for images, _ in make()]
    for options, number in (({}, 2), ({"micro_batches": 3}, 3)):
        ranks = [tf_data_source(make(), plan) for plan in plans(2, **options)]
        assert one_pass(ranks) == groups(expected, number)
        assert "Window" in kinds_in(ranks[0].dataset()), "a rank decodes images before it takes its own"


def stateful(row):
    return row + tf.cast(tf.random.uniform([], seed=1) * 0, tf.int64)


@pytest.mark.parametrize(
    ("make", "start"),
    [
        (lambda: Dataset.range(8).map(lambda x: x + 1).shuffle(8).batch(2), 0),
        (lambda: Dataset.range(8).map(stateful).batch(2), 0),
        (lambda: Dataset.range(8).map(stateful).shuffle(8).batch(2), 1),
        (lambda: Dataset.range(8).map(stateful).batch(2).repeat(), 1),
        (lambda: Dataset.range(8).batch(2).map(stateful).repeat().map(lambda x: x), 2),
        (lambda: Dataset.range(8).map(lambda x: x + 1).cache().shuffle(8).batch(2), 2),
        (lambda: Dataset.range(8).shuffle(8).cache().batch(2), 0),  # the cache is before the pipeline's steps
        (lambda: Dataset.range(8).filter(lambda x: x > 1).cache().repeat().batch(2), 2),
        (lambda: Dataset.range(8).batch(2).batch(2), 1),
    ],
)
def test_where_the_choice_stops(make, start):
    tail = tail_of(Pipeline(make(), seed=7), Plan(), static=False)
    assert tail.start == start
    assert (tail.numbered is None) == (start > 0 or kind(tail.pipeline.dataset(0)) != "Range")
