"""Groups of a stream's batches, one for each rank, where an epoch does not end with a full group."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from kdist.data.batch import int64
from kdist.data.sharding import Plan


def is_exact(plan: Plan) -> bool:
    """Returns whether groups of `plan.num_shards` batches follow each other without a gap."""
    return plan.steps_per_epoch is None or plan.steps_per_epoch % plan.num_shards == 0


def pad_epochs(batches: tf.data.Dataset, empty: Callable[[], tf.data.Dataset], plan: Plan) -> tf.data.Dataset:
    """Fills the last group of each epoch, so that groups of `plan.num_shards` restart with the epoch.

    Args:
        batches: `tf.data.Dataset`, with one element for each of the user's batches.
        empty: callable that returns a dataset of one element, which stands for none.
        plan: `Plan`.
    """
    epoch = plan.steps_per_epoch
    if epoch is None or is_exact(plan):
        return batches
    padded = -(-epoch // plan.num_shards) * plan.num_shards
    choice = tf.data.Dataset.range(padded).map(lambda number: int64(number >= epoch)).repeat()
    return tf.data.Dataset.choose_from_datasets([batches, empty().repeat()], choice, stop_on_empty_dataset=True)
