"""Datasets continue after the orders of their seeded shuffles that were made by hand."""

import pytest
import tensorflow as tf

from kdist.data.graphs.dataset_internals import BY_HAND, resources_of, seeded_shuffles
from kdist.data.pipelines.pipeline import Pipeline
from kdist.trainer.feeding.orders_by_hand import OrdersByHand


def part(number):
    return tf.data.Dataset.range(10 * number, 10 * number + 10)


def shuffled(kind):
    """Returns a dataset whose last shuffle is made again by itself, or in a graph."""
    data = tf.data.Dataset.range(2).shuffle(2, seed=7).interleave(part, cycle_length=1)
    data = data.shuffle(20, seed=3)
    return data if kind == "by itself" else data.interleave(tf.data.Dataset.from_tensors, cycle_length=1)


def orders(dataset, count):
    return [list(dataset.as_numpy_iterator()) for _ in range(count)]


@pytest.mark.parametrize("kind", ["by itself", "in a graph"])
def test_the_orders_of_two_calls_and_iterations_between_them(kind):
    whole, given = orders(shuffled(kind), 6), shuffled(kind)
    of_call = OrdersByHand({"x": given, "epochs": 2})
    assert of_call.made() == of_call.skipped() == {}
    for each in seeded_shuffles(given):
        resources_of(each)[BY_HAND] = 2
    assert of_call.made() == {"x": [2, 2]}
    of_call.skip(of_call.made())
    assert of_call.skipped() == {"x": [2, 2]}
    made = Pipeline(given, 1).dataset()
    assert orders(made, 2) == whole[2:4]
    of_call.skip({"x": [3, 3]})
    assert orders(made, 2) == whole[5:] + orders(shuffled(kind), 7)[6:]


def test_each_of_two_datasets_of_one_shuffle_has_its_own_graph():
    """What one has skipped is not skipped again for it, and not forgotten for the other."""
    base = tf.data.Dataset.range(20).shuffle(20, seed=3)
    both = [base.interleave(tf.data.Dataset.from_tensors, cycle_length=1) for _ in range(2)]
    for each in both:
        OrdersByHand({"x": each}).skip({"x": [0]})
        Pipeline(each, 1)
    for each in both:
        OrdersByHand({"x": each}).skip({"x": [1]})
    second = orders(tf.data.Dataset.range(20).shuffle(20, seed=3), 2)[1]
    assert [orders(Pipeline(each, 1).dataset(), 1)[0] for each in both] == [second, second]
