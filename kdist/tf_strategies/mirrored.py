"""Several devices in one process: the strategy is TensorFlow's own."""

from __future__ import annotations

import tensorflow as tf


def mirrored_strategy() -> tf.distribute.MirroredStrategy:
    """Returns a strategy with a replica on each GPU, or without GPUs on each logical CPU device.

    Logical CPU devices are for tests: `tf.config.set_logical_device_configuration` makes several of one CPU.
    """
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return tf.distribute.MirroredStrategy([f"/device:{device.device_type}:{i}" for i, device in enumerate(devices)])
