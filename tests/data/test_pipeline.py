"""Unseeded shuffles and sloppy steps follow one order on all ranks, or are refused by name."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.data.graphs import dataset_internals, inspection
from kdist.data.graphs.fingerprint import fingerprint_of_pipeline
from kdist.data.graphs.graph_def import GraphTooLargeError, graph_of
from kdist.data.pipelines import determinism, pipeline
from kdist.data.pipelines.pipeline import Pipeline
from kdist.errors import DataError

Dataset = tf.data.Dataset


@pytest.fixture(autouse=True)
def no_global_seed():
    """Unseeded shuffles are unseeded, whatever a test before has set."""
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(None)


def epochs(dataset, count=2):
    """Draws epochs as one flat list of numbers each."""

    def leaves(element):
        return tf.nest.flatten(element, expand_composites=True)

    return [[np.asarray(leaf).tolist() for element in dataset for leaf in leaves(element)] for _ in range(count)]


def slow(number):
    """Takes longer for some numbers, so that a sloppy parallel map changes their order."""

    def wait(number):
        time.sleep(0.02 * (2 - number % 3))
        return number

    result = tf.numpy_function(wait, [number], tf.int64)
    result.set_shape([])
    return result


def lookup(dataset):
    keys = tf.lookup.KeyValueTensorInitializer(tf.range(8), tf.range(8) * 10)
    table = tf.lookup.StaticHashTable(keys, -1)
    return dataset.map(lambda x: table.lookup(tf.cast(x, tf.int32)))


def inner(number):
    return Dataset.range(4).map(lambda x: x + 10 * number)


# Pipelines that yield a new order in each epoch.
RESHUFFLED = {
    "by itself": lambda: Dataset.range(8).shuffle(8),
    "before batch": lambda: Dataset.range(8).shuffle(8).batch(3).prefetch(1),
    "after batch": lambda: Dataset.range(8).batch(2).shuffle(8).map(lambda x: x + 1),
    "before parallel batch": lambda: Dataset.range(8).shuffle(8).batch(2, num_parallel_calls=2),
    "repeated": lambda: Dataset.range(6).shuffle(6).repeat(2),
    "skip and take": lambda: Dataset.range(9).shuffle(9).skip(0).take(9),
    "two, one seeded": lambda: Dataset.range(8).shuffle(8, seed=3).shuffle(8).map(lambda x: x),
    "with a lookup table": lambda: lookup(Dataset.range(8).shuffle(8)),
    "zipped": lambda: Dataset.zip(Dataset.range(8).shuffle(8), Dataset.range(8)),
    "outside of a flat_map": lambda: Dataset.range(5).shuffle(5).flat_map(inner),
    "a generator": lambda: Dataset.from_generator(
        lambda: iter(range(8)), output_signature=tf.TensorSpec([], tf.int64)
    ).shuffle(8),
    "of pairs": lambda: Dataset.from_tensor_slices({"a": np.arange(8), "b": np.arange(8)}).shuffle(8).batch(2),
    "ragged": lambda: Dataset.range(8).shuffle(8).map(lambda x: tf.RaggedTensor.from_row_lengths([x], [1])),
}
# Pipelines whose order may be the same in each epoch.
ORDERED = {
    "reshuffle_each_iteration=False": lambda: Dataset.range(8).shuffle(8, reshuffle_each_iteration=False).repeat(2),
    "inside of a flat_map": lambda: Dataset.range(3).flat_map(lambda i: inner(i).shuffle(4)),
    "inside of a sloppy interleave": lambda: Dataset.range(3).interleave(
        lambda i: inner(i).shuffle(4), num_parallel_calls=2, deterministic=False
    ),
    "sloppy map": lambda: Dataset.range(9).map(slow, num_parallel_calls=9, deterministic=False),
    "sloppy interleave": lambda: Dataset.range(6).interleave(
        lambda i: Dataset.from_tensors(i).map(slow), cycle_length=6, num_parallel_calls=6, deterministic=False
    ),
    "random": lambda: Dataset.random().take(4),
    "sample_from_datasets": lambda: Dataset.sample_from_datasets([Dataset.range(4), Dataset.range(10, 14)], [0.5, 0.5]),
    "cached shuffle": lambda: Dataset.range(8).shuffle(8).cache(),
}


@pytest.mark.parametrize("name", RESHUFFLED)
def test_unseeded_shuffles_follow_one_order_and_change_it(name):
    make = RESHUFFLED[name]
    one, other = (epochs(Pipeline(make(), seed=7).dataset()) for _ in range(2))
    assert one == other
    assert one[0] != one[1]
    plain = epochs(make(), count=1)
    flat = [np.concatenate([np.ravel(part) for part in epoch]) for epoch in (one[0], one[1], plain[0])]
    assert sorted(flat[0]) == sorted(flat[1]) == sorted(flat[2])
    assert epochs(Pipeline(make(), seed=8).dataset()) != one


@pytest.mark.parametrize("name", ORDERED)
def test_sloppy_steps_follow_one_order(name):
    one, other = (epochs(Pipeline(ORDERED[name](), seed=7).dataset()) for _ in range(2))
    assert one == other


def test_the_shuffles_really_differ_without_a_pipeline():
    assert epochs(Dataset.range(20).shuffle(20)) != epochs(Dataset.range(20).shuffle(20))


def image_tutorial():
    return Dataset.range(40).shuffle(40, reshuffle_each_iteration=False)


# How TensorFlow's tutorials split: the shuffle has one order for all that is made of it.
SPLITS = {
    "steps": lambda full: (full.skip(10).batch(4), full.take(10).batch(4)),
    "graphs": lambda full: (full.skip(10).cache().shuffle(30), full.take(10).cache()),
    "a step and a graph": lambda full: (full.skip(10).map(lambda x: x), full.take(10).cache()),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "make",
    [
        image_tutorial,
        lambda: image_tutorial().shuffle(40, reshuffle_each_iteration=False),
        lambda: Dataset.range(40).shuffle(40).cache(),
        lambda: Dataset.range(40).shuffle(40).map(lambda x: x).cache().prefetch(1),
    ],
)
def test_what_is_taken_and_what_is_skipped_have_nothing_in_common(make, split):
    """Whenever the methods come that they are given to."""
    parts = SPLITS[split](make())
    train, val = (
        set(np.concatenate(epochs(Pipeline(part, seed).dataset(), 1)[0], axis=None)) for seed, part in enumerate(parts)
    )
    assert (len(train), len(val), len(train | val)) == (30, 10, 40)
    (again,) = epochs(Pipeline(parts[1], seed=9).dataset(), 1)
    assert set(np.concatenate(again, axis=None)) == val


@pytest.mark.parametrize("length", [40, 41])
def test_balanced_classes_are_split_without_overlap(length):
    """Whatever a shuffled dataset is joined with: in training the other class, shuffled again, comes before it."""
    one = Dataset.range(40).shuffle(40, reshuffle_each_iteration=False)
    other = Dataset.range(100, 100 + length).shuffle(41, reshuffle_each_iteration=False)
    train = one.skip(10).shuffle(30).concatenate(other.skip(10).shuffle(31)).batch(4)
    val = one.take(10).concatenate(other.take(10)).batch(4)
    parts = [
        set(np.concatenate(epochs(Pipeline(part, seed).dataset(), 1)[0], axis=None))
        for seed, part in enumerate((train, val, other.take(10)))
    ]
    assert not parts[0] & parts[1]
    assert parts[2] < parts[1]


READERS = {
    "text, interleaved": lambda names: names.interleave(tf.data.TextLineDataset),
    "text": tf.data.TextLineDataset,
    "text in parallel": lambda names: tf.data.TextLineDataset(names, num_parallel_reads=2),
    "records of a length": lambda names: tf.data.FixedLengthRecordDataset(names, 2),
}


@pytest.mark.parametrize("reader", READERS)
def test_shuffled_file_names_follow_one_order(tmp_path, reader):
    for file in range(6):
        tmp_path.joinpath(f"{file}.txt").write_text(f"{file}\n")

    def make():
        return READERS[reader](Dataset.list_files(str(tmp_path / "*.txt"))).batch(2)

    one, other = (epochs(Pipeline(make(), seed=7).dataset()) for _ in range(2))
    assert one == other
    assert one[0] != one[1]
    assert "ShuffleDataset" in " ".join(pipeline.nondeterministic_parts(make()))
    assert inspection.may_reshuffle(make())


def test_names_of_files_are_compared():
    paths = [["a", "b"], ["b", "a"]]
    one, other = (fingerprint_of_pipeline(tf.data.TextLineDataset(names).batch(2)) for names in paths)
    assert one != other


# Seeded shuffles, known as a step or closed in a graph.
SEEDED = {
    "a step": lambda: Dataset.range(9).shuffle(9, seed=1).map(lambda x: x).batch(2),
    "two": lambda: Dataset.range(9).shuffle(4, seed=1).batch(2).shuffle(3, seed=2),
    "with an unseeded one": lambda: Dataset.range(1).repeat(9).shuffle(9).enumerate().shuffle(9, seed=1),
    "repeated": lambda: Dataset.range(9).shuffle(9, seed=1).repeat(2),
    "filtered": lambda: Dataset.range(9).shuffle(9, seed=1).filter(lambda x: x != 3).batch(2),
    "cached": lambda: Dataset.range(9).shuffle(9, seed=1).cache().shuffle(9, seed=2),
    "interleaved": lambda: Dataset.range(9).shuffle(9, seed=1).interleave(inner),
    "random": lambda: Dataset.random(seed=1, rerandomize_each_iteration=True).take(4),
    "zipped": lambda: Dataset.zip(Dataset.range(9).shuffle(9, seed=1), Dataset.range(9).shuffle(9, seed=2)),
    "a generator": lambda: (
        Dataset.from_generator(lambda: iter(range(8)), output_signature=tf.TensorSpec([], tf.int64))
        .shuffle(8, seed=1)
        .filter(lambda x: x != 3)
    ),
    "paired": lambda: Dataset.zip((shuffled := Dataset.range(9).shuffle(9, seed=3), shuffled)),
    "one after itself": lambda: (shuffled := Dataset.range(9).shuffle(9, seed=3)).concatenate(shuffled),
}


# A shuffle before a step that decides about elements, or makes several of one.
SHUFFLED = {
    "filter": lambda shuffled: shuffled.filter(lambda x: x != 3).batch(2),
    "flat_map": lambda shuffled: shuffled.flat_map(lambda x: Dataset.range(x).map(lambda y: y + x)),
    "unbatch": lambda shuffled: shuffled.batch(4).map(lambda x: {"a": x, "b": (x, x)}).unbatch().batch(3),
    "padded_batch": lambda shuffled: shuffled.map(lambda x: (tf.range(x), {"a": x})).padded_batch(2),
    "padded_batch with values": lambda shuffled: (
        shuffled.map(lambda x: (tf.range(x), tf.strings.as_string(x)))
        .padded_batch(2, ([9], []), (tf.constant(-1, tf.int64), "-"), drop_remainder=True)
        .map(lambda x, y: x)
    ),
    "a table": lambda shuffled: lookup(shuffled).filter(lambda x: x > 20),
}


@pytest.mark.parametrize("name", SHUFFLED)
@pytest.mark.parametrize("seed", [None, 1])
def test_arrays_are_never_serialised_for_a_shuffle_before(monkeypatch, caplog, name, seed):
    """Several copies of them would be held meanwhile, and above 2 GB a graph is refused."""

    def serialised(_):
        raise AssertionError("a graph is serialised")

    monkeypatch.setattr(determinism, "graph_of", serialised)

    def make():
        return SHUFFLED[name](Dataset.from_tensor_slices(np.arange(9)).shuffle(9, seed=seed))

    one, other = (epochs(Pipeline(make(), seed=7).dataset()) for _ in range(2))
    assert not caplog.text
    assert one == other
    assert one[0] != one[1]
    if seed is None:
        in_order = epochs(SHUFFLED[name](Dataset.from_tensor_slices(np.arange(9))), 1)
        flat = [np.concatenate([np.ravel(part) for part in epoch]) for epoch in (one[0], in_order[0])]
        assert name == "padded_batch with values" or sorted(flat[0][flat[0] > 0]) == sorted(flat[1][flat[1] > 0])
    else:
        assert one == epochs(make())
    assert Pipeline(make(), seed=7).dataset().element_spec == make().element_spec


def shuffled_five():
    return Dataset.range(5).shuffle(5)


# Shuffles that are no inputs of an operation.
HELD = {
    "captured": lambda: (held := shuffled_five(), Dataset.range(3).flat_map(lambda _: held))[1],
    "captured after a shuffle": lambda: (
        held := shuffled_five(),
        Dataset.range(3).shuffle(3).flat_map(lambda _: held),
    )[1],
    "captured by a map": lambda: (
        held := shuffled_five(),
        Dataset.range(3).map(lambda _: held).flat_map(lambda part: part),
    )[1],
    "elements": lambda: (
        Dataset.from_tensor_slices([shuffled_five(), shuffled_five()]).flat_map(lambda part: part).batch(2)
    ),
    "an element": lambda: Dataset.from_tensors(shuffled_five()).flat_map(lambda part: part),
}


@pytest.mark.parametrize("name", HELD)
def test_a_shuffle_that_an_operation_holds_is_found_in_the_graph(name):
    one, other = (epochs(Pipeline(HELD[name](), seed=7).dataset()) for _ in range(2))
    assert one == other
    assert one[0] != one[1]
    assert pipeline.nondeterministic_parts(HELD[name]())


def test_a_seeded_shuffle_that_is_held_has_the_orders_of_one_process():
    def make():
        held = Dataset.range(5).shuffle(5, seed=1)
        return Dataset.range(3).flat_map(lambda _: held)

    assert epochs(Pipeline(make(), seed=7).dataset()) == epochs(make())


def test_ragged_rows_need_no_graph(monkeypatch):
    monkeypatch.setattr(pipeline, "graph_of", lambda _: 1 / 0)
    ragged = Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])).batch(2)
    assert Pipeline(ragged, seed=7).dataset() is ragged


@pytest.mark.parametrize("name", SEEDED)
@pytest.mark.parametrize("iterations", [0, 1])
def test_seeded_shuffles_have_the_orders_of_one_process_after_iterations_by_the_user(name, iterations):
    expected, dataset = epochs(SEEDED[name](), 4), SEEDED[name]()
    for _ in range(iterations):
        next(iter(dataset))
    found = epochs(Pipeline(dataset, seed=7).dataset())
    for _ in range(iterations):
        next(iter(dataset))
    assert found + epochs(Pipeline(dataset, seed=8).dataset()) == expected
    assert expected[0] != expected[1]


def test_a_seeded_shuffle_that_cannot_be_made_anew_is_warned_of(caplog, monkeypatch):
    monkeypatch.setattr(determinism, "graph_of", lambda _: 1 / 0)
    dataset = SEEDED["zipped"]()
    assert epochs(Pipeline(dataset, seed=7).dataset()) == epochs(SEEDED["zipped"]())
    assert "A seeded shuffle in" in caplog.text


def test_an_orderly_pipeline_stays_the_users_own():
    dataset = Dataset.range(8).shuffle(8, seed=1, reshuffle_each_iteration=False).map(lambda x: x).batch(2)
    assert Pipeline(dataset, seed=7).dataset() is dataset
    grouped = Dataset.range(8).group_by_window(lambda x: x % 2, lambda _, part: part.batch(2), window_size=2)
    assert Pipeline(grouped, seed=7).dataset() is grouped


def test_a_kind_that_is_not_known_is_inspected_as_a_graph(monkeypatch):
    monkeypatch.setattr(dataset_internals, "_OPS", {})
    one, other = (Pipeline(Dataset.range(8).shuffle(8).batch(3), seed=7) for _ in range(2))
    assert one.steps == ()
    assert epochs(one.dataset()) == epochs(other.dataset())


@pytest.mark.parametrize("name", RESHUFFLED)
def test_global_seeds_that_differ_change_no_order(name):
    """As of ranks that call `tf.random.set_seed(rank)` after the dataset is made."""
    found = []
    for rank in range(2):
        dataset = RESHUFFLED[name]()
        tf.random.set_seed(1 + rank)
        found.append(epochs(Pipeline(dataset, seed=7).dataset()))
        tf.random.set_seed(None)
    assert found[0] == found[1]


def test_a_graph_above_2_gb_is_refused_only_where_its_order_may_differ(monkeypatch, caplog):
    monkeypatch.setattr(tf.raw_ops, "DatasetToGraphV2", lambda **_: tf.constant(b""))  # what TensorFlow gives then
    with pytest.raises(GraphTooLargeError):
        graph_of(Dataset.range(2))

    def sampled(seed):
        parts = [Dataset.range(4).shuffle(4, seed=seed).repeat(), Dataset.range(9, 12).repeat()]
        return Dataset.sample_from_datasets(parts, [0.5, 0.5], seed=seed)

    with pytest.raises(DataError, match="after more than 2 GB"):
        Pipeline(sampled(None), seed=7).dataset()
    orderly = Dataset.range(8).interleave(inner, cycle_length=2).batch(2)
    assert Pipeline(orderly, seed=7).dataset() is orderly
    assert not caplog.text
    Pipeline(sampled(1), seed=7).dataset()
    assert "A seeded shuffle in" in caplog.text


@pytest.mark.parametrize("calls", [None, 2])
def test_an_interleave_without_a_length_is_ordered_by_the_cores(calls, tmp_path):
    numbers = Dataset.range(8)
    assert inspection.orders_by_cores(numbers.interleave(inner, num_parallel_calls=calls).batch(2))
    assert not inspection.orders_by_cores(numbers.interleave(inner, 2, num_parallel_calls=calls).batch(2))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    assert not inspection.orders_by_cores(numbers.interleave(inner, num_parallel_calls=calls).with_options(options))
    files = [str(tmp_path / "a")]
    for reader in (tf.data.TFRecordDataset, tf.data.TextLineDataset):
        assert inspection.orders_by_cores(reader(files, num_parallel_reads=tf.data.AUTOTUNE))
        assert not inspection.orders_by_cores(reader(files, num_parallel_reads=2))


def test_a_global_seed_is_a_seed():
    tf.random.set_seed(3)
    try:
        dataset = Dataset.range(8).shuffle(8)
        assert epochs(Pipeline(dataset, seed=7).dataset()) == epochs(dataset)
    finally:
        tf.random.set_seed(None)


def test_sloppy_options_of_the_user_are_overruled():
    options = tf.data.Options()
    options.deterministic = False
    dataset = Pipeline(Dataset.range(9).map(slow, num_parallel_calls=9).with_options(options), seed=7).dataset()
    options = tf.data.Options()
    options.deterministic = True
    assert epochs(dataset.with_options(options)) == [list(range(9))] * 2


def test_files_that_a_cache_will_write_are_known(tmp_path):
    path = str(tmp_path / "kept")
    cached = Dataset.range(8).cache(path).batch(2).cache()
    assert inspection.unwritten_cache_files(cached) == [path]
    assert epochs(cached, 1) == epochs(Pipeline(cached, seed=7).dataset(), 1)
    assert inspection.unwritten_cache_files(cached) == []  # it is whole now


@pytest.mark.parametrize(("seed", "is_told"), [(None, True), (1, False)])
def test_decisions_after_random_numbers_are_warned_of(caplog, seed, is_told):
    """Each rank draws its own: one may keep an element that another one leaves out."""
    drawn = Dataset.range(8).map(lambda x: tf.cast(x, tf.float32) + tf.random.uniform([], seed=seed))
    Pipeline(drawn.batch(2), 7)
    assert "keeps or groups" not in caplog.text
    for _ in range(2):
        Pipeline(drawn.filter(lambda x: x > 3), 7)
    assert caplog.text.count("keeps or groups elements (Filter)") == 2 * is_told


@pytest.mark.parametrize(("calls", "is_told"), [(None, False), (2, True)])
@pytest.mark.parametrize("draw", ["operation", "generator"])
def test_decisions_after_seeded_draws_of_parallel_calls_are_warned_of(caplog, calls, is_told, draw):
    """Which call gets which number depends on the threads, but for stateless draws."""
    generator = tf.random.Generator.from_seed(1)
    draws = {"operation": lambda: tf.random.uniform([], seed=1), "generator": lambda: generator.uniform([])}
    drawn = Dataset.range(8).map(lambda x: tf.cast(x, tf.float32) + draws[draw](), num_parallel_calls=calls)
    Pipeline(drawn.filter(lambda x: x > 3).batch(2), 7)
    assert ("num_parallel_calls" in caplog.text) == is_told
    stateless = Dataset.range(8).map(lambda x: tf.random.stateless_uniform([], [x, 1]), num_parallel_calls=2)
    caplog.clear()
    Pipeline(stateless.filter(lambda x: x > 0.3), 7)
    assert not caplog.text


def test_a_shuffle_in_a_function_is_warned_of(caplog):
    Pipeline(Dataset.range(3).flat_map(lambda i: inner(i).shuffle(4)), seed=7)
    assert "ShuffleDatasetV3 without a seed inside a function" in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.range(8).filter(lambda x: tf.random.uniform([]) < 0.5),
        lambda: Dataset.range(8).batch(2).flat_map(lambda x: Dataset.from_tensor_slices(tf.random.shuffle(x))),
        lambda: Dataset.range(8).take_while(lambda x: tf.random.uniform([]) < 0.9).batch(2),
    ],
    ids=["filter", "flat_map", "take_while"],
)
def test_random_decisions_are_refused_by_name(make):
    with pytest.raises(DataError, match=r"random numbers in the function of \w+Dataset.*Fix: pass a seed"):
        Pipeline(make(), seed=7)


@pytest.mark.parametrize("job", [{}, {"job_name": "shared"}])
def test_the_service_of_tf_data_is_refused_by_name(job):
    """It has shared the elements out already, or sends them in any order."""
    service = tf.data.experimental.service
    server = service.DispatchServer()
    distributed = Dataset.range(8).apply(service.distribute("parallel_epochs", server.target, **job)).batch(2)
    with pytest.raises(DataError, match=r"service.distribute.*Fix: .*job_name.*auto_shard=False"):
        Pipeline(distributed, seed=7)


def test_random_augmentation_is_left_alone():
    dataset = Dataset.range(8).map(lambda x: tf.random.uniform([]))
    assert Pipeline(dataset, seed=7).dataset() is dataset


def test_steps_pass_other_components_through():
    dataset = (
        Dataset.range(4).map(lambda x: {"a": x, "b": (x + 1, x + 2)}).map(lambda e: (e["a"], e["b"][1])).prefetch(2)
    )
    steps = Pipeline(dataset, seed=7).steps
    assert all(pipeline.is_elementwise(step) for step in steps)
    paired = Dataset.range(4).map(lambda x: (x, x * 100, True))
    for step in steps:
        paired = pipeline.apply_to_first(step, paired, 0)
    assert [[int(v) for v in tf.nest.flatten(e)] for e in paired] == [[x, x + 2, x * 100, 1] for x in range(4)]


@pytest.mark.parametrize("kind", ["seeded", "in a function", "keras"])
def test_a_map_draws_other_numbers_on_each_rank(kind):
    keras.utils.set_random_seed(5)
    generator = keras.random.SeedGenerator(3)
    draw = {
        "seeded": lambda x: tf.random.uniform([3]),
        "in a function": tf.function(lambda x: tf.random.normal([3]) + tf.ones([3])),
        "keras": lambda x: keras.random.uniform([3], seed=generator),
    }[kind]
    dataset = Dataset.range(5).map(draw)

    def drawn(rank):
        own = Dataset.range(5).map(lambda x: (x, rank))
        for step in Pipeline(dataset, seed=7).steps:
            own = pipeline.apply_to_first(step, own, rank)
        return [[element.numpy() for element, _ in own] for _ in range(2)]

    draws = np.array([drawn(rank) for rank in range(3)])
    # Each rank and element has its own; in a second pass TensorFlow's are drawn anew, and Keras' go on.
    num_passes = 2 if kind == "keras" else 1
    assert len(np.unique(draws.reshape(-1, 3), axis=0)) == 3 * 5 * num_passes
    if kind != "keras":
        np.testing.assert_array_equal(draws[1], drawn(1))


def test_a_map_keeps_what_it_closed_over():
    dataset = Dataset.range(3)
    for offset in (10, 20):
        dataset = dataset.map(lambda x: x + offset)  # noqa: B023  the trap that is tested
    paired = Dataset.range(3).map(lambda x: (x, 0))
    for step in Pipeline(dataset, seed=7).steps:
        paired = pipeline.apply_to_first(step, paired, 0)
    assert [int(x) for x, _ in paired] == [30, 31, 32]
