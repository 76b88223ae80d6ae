"""Groups of a stream's batches, those of a step, where an epoch does not end with a full group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdist.data.graphs.optionals import empty_optional, to_optional
from kdist.data.graphs.own_functions import mapped
from kdist.data.sharding import Plan


def pad_epochs(batches: tf.data.Dataset, empty: Callable[[], tf.data.Dataset], plan: Plan) -> tf.data.Dataset:
    """Fills the last group of each epoch, so that groups of `plan.group_size` restart with the epoch.

    Args:
        batches: `tf.data.Dataset`, with one element for each of the user's batches.
        empty: callable that returns a dataset of one element, which stands for none.
        plan: `Plan`.
    """
    epoch = plan.steps_per_epoch
    if epoch is None or plan.fills_groups:
        return batches
    padded = -(-epoch // plan.group_size) * plan.group_size
    choice = tf.data.Dataset.range(padded).map(lambda number: tf.cast(number >= epoch, tf.int64)).repeat()
    return tf.data.Dataset.choose_from_datasets([batches, empty().repeat()], choice, stop_on_empty_dataset=True)


def element_of(spec: Any, arguments: tuple[Any, ...]) -> Any:
    """Returns the element that `tf.data` passed to a function: it unpacks a plain tuple into the arguments."""
    return arguments if type(spec) is tuple else arguments[0]


def grouped(elements: tf.data.Dataset, plan: Plan, count: Callable[[Any], Any]) -> tf.data.Dataset:
    """Returns a dataset of the groups of `plan.group_size` elements.

    Elements pass as optionals, by reference: nothing is copied, shapes may differ.

    Args:
        elements: `tf.data.Dataset` of any elements.
        plan: `Plan`. Groups restart after each `steps_per_epoch` elements.
        count: callable that takes an element and returns its number of rows.

    Returns:
        A dataset of pairs of vectors, the optionals and their rows: 0 where an epoch ends within the group. At the end
        of the data they are shorter.
    """
    spec = elements.element_spec

    def pack(*arguments: Any) -> Any:
        element = element_of(spec, arguments)
        return to_optional(element), tf.cast(count(element), tf.int64)

    def empty() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(0).map(lambda _: (empty_optional(), tf.constant(0, tf.int64)))

    return pad_epochs(mapped(elements, pack), empty, plan).batch(plan.group_size)
