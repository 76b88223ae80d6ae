"""Which leaves of a batch have rows, and how they are sliced."""

import numpy as np
import pytest
import tensorflow as tf

from kdist.data.batch import Rows, batch_signature
from kdist.errors import DataError


def specs(*dimensions):
    return [tf.TensorSpec([size, 5]) for size in dimensions]


@pytest.mark.parametrize(
    ("inputs", "targets", "batch_sizes", "with_rows"),
    [
        ((3, None), (None,), (), [1, 2]),
        ((3, None), (), (), [1]),
        ((3, 4), (4,), (4,), [1, 2]),
        ((None, 3), (4,), (), [0, 2]),  # the output of a `numpy_function`
        ((4, 4), (4,), (), [0, 1, 2]),
        ((None, None), (None,), (), [0, 1, 2]),
    ],
)
def test_what_has_rows(inputs, targets, batch_sizes, with_rows):
    batch = (tuple(specs(*inputs)), *specs(*targets)) if targets else tuple(specs(*inputs))
    if not targets:
        batch = {str(number): leaf for number, leaf in enumerate(batch)}
    rows = Rows(batch, batch_sizes)
    assert [number for number in range(len(inputs) + len(targets)) if rows.has_rows(number)] == with_rows
    arrays = tf.nest.map_structure(lambda spec: np.zeros((7 if spec.shape[0] is None else spec.shape[0], 5)), batch)
    sliced = tf.nest.flatten(rows.slice(arrays, 1, 2))
    assert [number for number, leaf in enumerate(sliced) if len(leaf) == 1] == with_rows
    signature = tf.nest.flatten(batch_signature(batch, batch_sizes))
    assert [number for number, leaf in enumerate(signature) if leaf.shape[0] is None] == with_rows


@pytest.mark.parametrize("sizes", [((100, 300), (40,)), ((100, 300), (100,)), ((4, 3), (None,))])
def test_what_is_only_taken_whole(sizes):
    inputs, targets = sizes
    batch = (tuple(specs(*inputs)), *specs(*targets))
    arrays = tf.nest.map_structure(lambda spec: np.zeros((spec.shape[0] or 4, 5)), batch)
    rows = Rows(batch)
    assert rows.count(arrays) == (targets[0] or 4)
    assert rows.head(arrays, 1) is arrays
    with pytest.raises(DataError, match="parts have different first dimensions"):
        rows.slice(arrays, 0, 1)


def test_a_batch_whose_sizes_are_seen_in_the_step_is_padded_whole_where_they_differ():
    signature = (tuple(specs(None, None)), *specs(None))

    @tf.function(input_signature=[signature])
    def padding(batch):
        return Rows(signature).head(batch, 1)

    def lengths(*sizes):
        first, second, third = map(tf.zeros, [(size, 5) for size in sizes])
        return [len(leaf) for leaf in tf.nest.flatten(padding(((first, second), third)))]

    assert lengths(4, 4, 4) == [1, 1, 1]
    assert lengths(3, 4, 4) == [3, 4, 4]


def test_a_graph_with_a_target_is_taken_whole():
    """Nodes and edges are as many as they are, and the number of targets is known."""
    signature = (tuple(specs(None, None)), *specs(1))

    @tf.function(input_signature=[signature])
    def whole(batch):
        rows = Rows(signature)
        return rows.head(batch, 1), rows.count(batch)

    (inputs, target), count = whole(((tf.zeros([7, 5]), tf.zeros([9, 5])), tf.zeros([1, 5])))
    assert [len(leaf) for leaf in (*inputs, target)] == [7, 9, 1]
    assert count == 1

    @tf.function(input_signature=[signature])
    def split(batch):
        return Rows(signature).split(batch, 2, 0)

    with pytest.raises(tf.errors.InvalidArgumentError, match="different first dimensions"):
        split(((tf.zeros([7, 5]), tf.zeros([9, 5])), tf.zeros([1, 5])))


def test_nothing_that_has_rows():
    assert Rows({"a": None, "b": 1.0}).count({"a": None, "b": 1.0}) == 1
