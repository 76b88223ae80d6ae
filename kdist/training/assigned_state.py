"""The state that a training step writes beside the weights, such as moving statistics, made the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

if TYPE_CHECKING:
    from kdist.training.step import Step


class AssignedState:
    """Notes which non-trainable variables a step writes, and merges them over the ranks.

    Only what is written is merged: a constant, averaged in every step, would drift by rounding.

    Args:
        variables: the variables to watch.
    """

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        self._variables = [variable for variable in variables if is_merged(variable)]
        self._before = {id(v): tf.identity(v.value) for v in self._variables}
        self.assigned: list[keras.Variable] = []
        self.is_dirty = False

    def __enter__(self) -> AssignedState:
        self._graph = tf.compat.v1.get_default_graph()
        for variable in self._variables:
            variable.__dict__["_direct_assign"] = self._noting(variable)
        return self

    def __exit__(self, *exception: object) -> None:
        for variable in self._variables:
            variable.__dict__.pop("_direct_assign", None)

    def _noting(self, variable: keras.Variable) -> Callable[[Any], None]:
        def assign(value: Any) -> None:
            if not any(variable is known for known in self.assigned):
                self.assigned.append(variable)
            self.is_dirty = True
            type(variable)._direct_assign(variable, value)

        return assign

    def contributions(self, step: Step) -> list[tf.Tensor]:
        """Returns this rank's addend for each variable written so far."""
        return [self._contribution(variable, step) for variable in self.assigned]

    def _contribution(self, variable: keras.Variable, step: Step) -> tf.Tensor:
        value = tf.convert_to_tensor(variable._value)
        if variable.aggregation == "sum":
            added = value - self._before[id(variable)]
            return tf.where(step.active, added, tf.zeros_like(added))
        if variable.aggregation == "only_first_replica":
            return value if step.is_chief else tf.zeros_like(value)
        return step.weighted(value)

    def merge(self, totals: Sequence[tf.Tensor]) -> None:
        """Sets each variable written so far to what the ranks' addends sum to.

        In a branch of the step (an update in a `tf.cond` of the user's), which may not be run, what is merged stays to
        be merged after the step; and what is added up is left to that.
        """
        is_in_a_branch = tf.compat.v1.get_default_graph() is not self._graph
        self.is_dirty = is_in_a_branch
        for variable, total in zip(self.assigned, totals, strict=True):
            if variable.aggregation == "sum":
                if is_in_a_branch:
                    continue
                total = self._before[id(variable)] + total
                self._before[id(variable)] = tf.identity(total)
            type(variable)._direct_assign(variable, total)

    def put_back_unless(self, counts: tf.Tensor) -> None:
        """Undoes what was written if a `bool` scalar is false."""
        for variable in self.assigned:
            value = tf.where(counts, variable._value, self._before[id(variable)])
            type(variable)._direct_assign(variable, value)


def is_merged(variable: keras.Variable) -> bool:
    """Returns whether what the ranks have written to a variable can be merged: no whole numbers but what is summed."""
    return any(kind in str(variable.dtype) for kind in ("float", "complex")) or variable.aggregation == "sum"
