"""Counts of the collectives of graphs, kept by the graphs themselves in variables: no Python runs in them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from kdist.watch.activity import describe_collective


class Progress:
    """Counts the collectives that begin and end in graphs, for engines whose operations run without Python."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._begun, self._done, self._last = (
                tf.Variable(0, dtype=tf.int64, trainable=False, name=f"kdist_{name}")
                for name in ("begun", "done", "last")
            )
        self._texts = [""]  # what the number in `_last` stands for

    def begin(self, kind: str, tensors: Sequence[tf.Tensor], num_fixed: int) -> tf.Operation:
        """Returns the operation after which a collective may run.

        Args:
            kind: str, `"allreduce"`, `"allgather"`, ...
            tensors: sequence of tensors, what is sent.
            num_fixed: int, how many of them, the first ones, have the same shape on all ranks; the others are gathered.
        """
        text = _described(kind, tensors, num_fixed)
        if text not in self._texts:
            self._texts.append(text)
        with tf.control_dependencies(tensors):
            noted = self._last.assign(self._texts.index(text), read_value=False)
        with tf.control_dependencies([noted]):
            return self._begun.assign_add(1, read_value=False)

    def end(self, results: Sequence[tf.Tensor]) -> None:
        """Counts the end of the collective that returned these results."""
        with tf.control_dependencies(results):
            self._done.assign_add(1, read_value=False)

    def look(self) -> tuple[int, int, str]:
        """Returns how many have begun and ended, and what runs as text, if it is only one and known."""
        done = int(self._done.numpy())  # first, so that it is never ahead
        begun = int(self._begun.numpy())
        return begun, done, self._texts[int(self._last.numpy())] if begun == done + 1 else ""


def _described(kind: str, tensors: Sequence[tf.Tensor], num_fixed: int) -> str:
    """Returns a collective as text, equal on all ranks that make the same call; `""` if its shapes are not known."""
    shapes = [each.shape if place < num_fixed else each.shape[1:] for place, each in enumerate(tensors)]
    if not all(shape.is_fully_defined() for shape in shapes):
        return ""  # the shapes may be known on another rank
    return describe_collective(kind, [(each.dtype.name, tuple(each.shape)) for each in tensors], num_fixed)
