"""Buffer synchronisation: merges what a step writes beside weights over the ranks, such as moving statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.engines.tensors import flat
from kdist.keras_hooks.variables import raw_variable
from kdist.state.assignments import Assignments
from kdist.state.written import Merge, Written
from kdist.strategies.open_step import OpenStep


class BufferSync:
    """Merges the variables that a step writes and in which the ranks may differ; see `Assignments`.

    Other variables are not sent: a constant that is averaged in every step would drift by rounding.

    Args:
        step: the open step.
        assignments: `Assignments` of the step, which are open.
    """

    def __init__(self, step: OpenStep, assignments: Assignments) -> None:
        self._step = step
        self._assignments = assignments
        self._sent: list[tuple[Written, Merge]] = []

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """A context in which nothing is recorded, for the updates of weights."""
        return self._assignments.suspended()

    def contributions(self) -> list[tf.Tensor]:
        """Returns this rank's term for each variable that is to be merged, of those written so far.

        Collective in an eager step: every rank must call this, in the same order.
        """
        self._assignments.add_writes_of_other_ranks()
        if not self._sent:
            self._assignments.warn_of_differences()
        self._sent = self._assignments.to_merge()
        return [self._contribution(written, merge) for written, merge in self._sent]

    def _contribution(self, written: Written, merge: Merge) -> tf.Tensor:
        step, value, before = self._step, summable(written.variable), summable(written.before)
        if merge == "mean":
            return step.weighted(value if _is_inexact(value) else tf.cast(value, tf.float64))
        if merge == "first":
            return tf.where(step.active, value, before) if step.engine.rank == 0 else tf.zeros_like(value)
        added = tf.where(step.active, value - before, tf.zeros_like(value))
        if merge == "count":
            counts_rows = tf.reduce_any(added != 1) if self._assignments.is_eager else written.counts_rows
            flags = [step.active & counts_rows, step.active]
            return tf.stack([added, *(tf.fill(tf.shape(added), tf.cast(flag, added.dtype)) for flag in flags)])
        return added

    def merge(self, totals: Sequence[tf.Tensor]) -> None:
        """Sets each variable of the last contributions to what the sums of the ranks' terms make of it.

        A branch of the step (an update in a user's `tf.cond`) may not run. So its variables are merged again after the
        step, and those that are summed only there.
        """
        assignments = self._assignments
        is_in_branch = not assignments.is_eager and tf.compat.v1.get_default_graph() is not assignments.graph
        assignments.any_new = is_in_branch
        with self.suspended():
            for (written, merge), total in zip(self._sent, totals, strict=True):
                if merge not in ("sum", "count"):
                    self._set(written, merge, total)
                elif not is_in_branch:
                    if merge == "count":
                        total, num_counting, num_active = tf.unstack(total)
                        total = tf.where(num_counting > 0, total, total // tf.maximum(num_active, 1))
                    self._set(written, merge, summable(written.before) + total)
                    written.before = tf.identity(raw_variable(written.variable))

    def _set(self, written: Written, merge: Merge, value: tf.Tensor) -> None:
        raw = raw_variable(written.variable)
        is_guessed = self._assignments.is_eager and bool(self._step.active)
        if is_guessed and (merge in ("sum", "count") or not _is_near(summable(raw), value)):
            self._assignments.warn(written, merge)
        is_rounded = value.dtype.is_floating and not _is_inexact(raw)
        raw.assign(tf.cast(tf.round(value) if is_rounded else value, raw.dtype))

    def merge_the_rest(self) -> None:
        """Merges what was written after the last message of gradients, or without any, if there is something.

        Collective: every rank must call this, in the same order.
        """
        if self._assignments.is_any_new() and (contributions := self.contributions()):
            self.merge(self._step.engine.allreduce(contributions))

    def restore_unless(self, condition: tf.Tensor) -> None:
        """Restores the variables in which ranks may differ if a `bool` scalar is false."""
        with self.suspended():
            for written, _ in self._assignments.to_merge():
                raw = raw_variable(written.variable)
                raw.assign(tf.where(condition, raw, written.before))


def is_mergeable(variable: keras.Variable) -> bool:
    """Returns whether a variable can be averaged over the ranks, or is to be summed."""
    return any(kind in str(variable.dtype) for kind in ("float", "complex")) or variable.aggregation == "sum"


def _is_inexact(value: tf.Tensor) -> bool:
    return bool(value.dtype.is_floating or value.dtype.is_complex)


def summable(value: Any) -> tf.Tensor:
    """Returns a tensor that can be subtracted and summed: `int64` for integers of any size and `bool`."""
    value = tf.convert_to_tensor(raw_variable(value))
    return value if _is_inexact(value) else tf.cast(value, tf.int64)


def _is_near(one: tf.Tensor, other: tf.Tensor) -> bool:
    one, other = flat.to_array(one), flat.to_array(other)
    return bool((abs(one - other) <= 1e-6 * abs(other).max(initial=0.0)).all())
