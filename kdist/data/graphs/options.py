"""Options of a dataset that is a rank's shard."""

from __future__ import annotations

import tensorflow as tf


def sharded_options() -> tf.data.Options:
    """Returns options by which a dataset is not sharded again if it is given to `fit`."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options
