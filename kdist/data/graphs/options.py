"""Options of a dataset that is a rank's shard, and what they mean for its last buffer."""

from __future__ import annotations

import tensorflow as tf


def sharded_options() -> tf.data.Options:
    """Returns options by which a dataset is not sharded again if it is given to `fit`."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without a tuner: the end of a tuned iterator waits for the tuner's thread, which sleeps."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def prefetched(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset that makes elements ahead of their use: as many as the tuner says, or two without it."""
    has_tuner = dataset.options().autotune.enabled is not False
    return dataset.prefetch(tf.data.AUTOTUNE if has_tuner else 2)
