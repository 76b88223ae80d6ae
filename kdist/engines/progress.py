"""How far the collectives of graphs are, counted by the graphs themselves: no Python runs in them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class Progress:
    """Counts collectives that begin and end in graphs, for an engine whose operations are TensorFlow's own."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._begun, self._done = (
                tf.Variable(0, dtype=tf.int64, trainable=False, name=f"kdist_{name}") for name in ("begun", "done")
            )

    def begin(self, tensors: Sequence[tf.Tensor]) -> tf.Operation:
        """Returns the operation after which a collective of these tensors may run."""
        with tf.control_dependencies(tensors):
            return self._begun.assign_add(1, read_value=False)

    def end(self, results: Sequence[tf.Tensor]) -> None:
        """Counts the end of the collective that had these results."""
        with tf.control_dependencies(results):
            self._done.assign_add(1, read_value=False)

    def counts(self) -> tuple[int, int]:
        """Returns how many have begun and how many have ended."""
        done = int(self._done.numpy())  # first, so that it is never ahead
        return int(self._begun.numpy()), done
