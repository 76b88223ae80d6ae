"""The end of a pass over data of unknown length, raised within a step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def end_of_data_unless(has_rows: tf.Tensor) -> tf.Tensor:
    """Ends the pass over the data, as the end of a dataset does, unless a `bool` scalar is true."""

    def stop() -> Any:
        raise StopIteration

    if tf.executing_eagerly():
        return tf.constant(True) if has_rows else stop()
    # TensorFlow turns StopIteration into OutOfRangeError, which ends Keras' loop.
    return tf.cond(
        has_rows, lambda: tf.constant(True), lambda: tf.ensure_shape(tf.numpy_function(stop, [], tf.bool), ())
    )
