"""Tests maps with functions of kdist's own against those of `tf.data`, and that they are quick to prepare."""

import collections
import gc

import numpy as np
import pytest
import tensorflow as tf

from kdist.data.graphs.dataset_internals import ON_ONE_DEVICE, inputs
from kdist.data.graphs.graph_def import graph_of
from kdist.data.graphs.own_functions import is_mapped, mapped, mapped_again
from kdist.data.sharding import Plan
from kdist.data.tf_data import tf_data_source

Dataset = tf.data.Dataset
Pair = collections.namedtuple("Pair", "left right")
ROWS = np.arange(60, dtype=np.float32).reshape(20, 3)


@pytest.mark.parametrize(
    ("dataset", "function"),
    [
        (Dataset.range(5), lambda x: x + 1),
        (Dataset.range(5), lambda x: (x, {"twice": 2 * x})),
        (Dataset.from_tensor_slices((ROWS, ROWS[:, 0])), lambda x, y: Pair(x * y, y)),
        (Dataset.from_tensor_slices({"a": ROWS, "b": ROWS}), lambda row: row["a"] + row["b"]),
        (Dataset.from_tensor_slices(Pair(ROWS, ROWS)), lambda pair: pair.left),
        (Dataset.range(20).batch(3), lambda rows: tf.gather(ROWS, rows)),
        (Dataset.range(9), lambda x: tf.cond(x > 3, lambda: x, lambda: -x)),  # which one thread waits for in vain
        (Dataset.range(7).window(3), lambda window: window.cardinality()),
        (Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])).batch(2), lambda rows: rows.row_lengths()),
    ],
)
def test_they_do_what_a_map_does(dataset, function):
    expected = dataset.map(function)
    made = mapped(dataset, function)
    assert made.element_spec == expected.element_spec
    assert made.cardinality() == expected.cardinality()
    for one, other in zip(made, expected, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, tf.nest.flatten(one), tf.nest.flatten(other))


def test_one_is_applied_to_another_dataset():
    table = tf.constant([5, 7, 9, 11])
    made = mapped(Dataset.range(4), lambda number: tf.gather(table, number))
    again = mapped_again(made, Dataset.range(3, -1, -1))
    del made
    gc.collect()  # the traced function stays
    assert list(again.as_numpy_iterator()) == [11, 9, 7, 5]
    assert is_mapped(again)
    assert [each.element_spec for each in inputs(again)] == [tf.TensorSpec((), tf.int64)]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_ranks_choice_of_rows_is_for_one_device_and_one_thread(shuffled):
    slices = Dataset.from_tensor_slices((ROWS, ROWS))
    user = (slices.shuffle(20, seed=1) if shuffled else slices).batch(2)
    graph = graph_of(tf_data_source(user, Plan(num_shards=2, shard_id=1)).dataset())
    maps = [node for node in graph.node if node.op == "MapDataset"]
    assert len(maps) == 1
    assert not maps[0].attr["use_inter_op_parallelism"].b
    (called,) = [each for each in graph.library.function if each.signature.name == maps[0].attr["f"].func.name]
    assert all(called.attr[name].b is value for name, value in ON_ONE_DEVICE.items())


def test_tensorflow_rewrites_what_it_may_gain_by():
    slices = Dataset.from_tensor_slices((ROWS, ROWS))

    def is_rewritten(user):
        options = tf_data_source(user, Plan(num_shards=2, shard_id=1)).dataset().options()
        return options.experimental_optimization.apply_default_optimizations is not False

    assert not is_rewritten(slices.batch(2))
    assert not is_rewritten(slices.shuffle(20).batch(2).prefetch(2))
    assert is_rewritten(slices.shuffle(20, seed=1).repeat(2).batch(2))  # joined, they have another order
    assert is_rewritten(slices.map(lambda x, y: (x + 1, y)).batch(2))
    assert is_rewritten(slices.filter(lambda x, y: True).batch(2))
