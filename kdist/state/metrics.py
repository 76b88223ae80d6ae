"""Metrics as summed states: each rank updates its own, and their states are added at defined points.

Metrics whose states are not known to add up are updated with the global batch, and are equal on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.keras_hooks.metrics import summed_variables
from kdist.state.part import Placement, State, StatePart

Sums = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]
"""Returns the sums of tensors over the ranks."""


def add_over_ranks(
    engine: Engine, variables: Sequence[keras.Variable], before: Sequence[tf.Tensor], allreduce: Sums | None = None
) -> None:
    """Sums the changes of metric variables since a common state over the ranks, in one message.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks communicate.
        variables: sequence of metric variables; equal on all ranks afterwards.
        before: sequence of tensors, the values in the common state.
        allreduce: `Sums` or `None`, called also without variables; by default the engine's.
    """
    if not variables and allreduce is None:
        return
    changes = [_numeric(v.value) - _numeric(b) for v, b in zip(variables, before, strict=True)]
    added = (allreduce or engine.allreduce)(changes)
    for variable, start, total in zip(variables, before, added, strict=True):
        if variable.aggregation == "mean":
            total = total / tf.cast(engine.size, total.dtype)
        variable.assign(tf.cast(_numeric(start) + total, variable.dtype))


class MetricReducer(StatePart):
    """A model's metrics in a pass over the data: each rank counts its own rows, and the end of the pass sums them."""

    name = "metrics"
    placement = Placement.PER_RANK

    def __init__(self, model: keras.Model, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        self._start: dict[int, tf.Tensor] = {}
        self._own: dict[int, tf.Tensor] = {}
        self._loaded: list[Any] | None = None
        self._all_are_summed = False

    def begin(self, *, all_are_summed: bool = False, is_of_fit: bool = True) -> None:
        """Stores the state that all ranks have in common.

        Args:
            all_are_summed: bool, whether no metric is updated with the global batch, as with local SGD.
            is_of_fit: bool, whether `fit` trains in the pass, which then begins with the loaded state.
        """
        self._all_are_summed = all_are_summed
        self.rebase()
        if is_of_fit:
            self.restore()
            self.forget()

    def rebase(self) -> None:
        """Takes the state of now, which is equal on all ranks, for the common one: metrics were reset."""
        self._start = {id(v): _numeric(tf.identity(v.value)) for v in self._model.metrics_variables}
        self._own = {}

    @contextlib.contextmanager
    def counting_together(self) -> Iterator[None]:
        """A context in the midst of a pass in which what is counted is counted equally on all ranks."""
        self._own = {id(v): self._own_part(v) for v in self._model.metrics_variables}
        yield
        own = self._own  # of before, unless the metrics were reset
        self.rebase()
        self._start = {key: value - own[key] if key in own else value for key, value in self._start.items()}

    def _own_part(self, variable: keras.Variable) -> tf.Tensor:
        """Returns what this rank has counted since `begin`."""
        value = _numeric(variable.value)
        return value - self._start.get(id(variable), tf.zeros_like(value))

    def end(self, *, all_are_summed: bool = False, allreduce: Sums | None = None) -> None:
        """Sums what the ranks have counted since `begin`; the epoch may continue after an evaluation.

        Collective: every rank must call this, in the same order.

        Args:
            all_are_summed: bool, as for `begin`, of the pass that may continue.
            allreduce: see `add_over_ranks`.
        """
        variables = self._summed()
        before = [self._start.get(id(v), tf.zeros_like(v.value)) for v in variables]
        add_over_ranks(self._engine, variables, before, allreduce)
        self.begin(all_are_summed=all_are_summed, is_of_fit=False)

    def _summed(self) -> list[keras.Variable]:
        return list(self._model.metrics_variables) if self._all_are_summed else summed_variables(self._model)

    def state_dict(self) -> State:
        """Returns the metrics of all ranks in the middle of a pass, arrays of shape `(size, ...)`."""
        summed = {id(variable) for variable in self._summed()}
        values = []
        for variable in self._model.metrics_variables:
            is_part = self._engine.rank and id(variable) in summed  # what all have in common, rank 0 saves
            value = self._own_part(variable) if is_part else variable.value
            values.append(tf.cast(value, variable.dtype)[tf.newaxis])
        gathered = self._engine.allgather(values)
        return {str(place): np.asarray(value) for place, value in enumerate(gathered)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the metrics with which the next pass begins, saved by any number of ranks.

        A state of other metrics is kept for later: in one process Keras makes metrics in the first step.
        """
        self._loaded = [state[str(place)] for place in range(len(state))]

    def restore(self) -> None:
        """Sets the metrics to the loaded state, if it is a state of these metrics."""
        variables = self._model.metrics_variables
        if self._loaded is not None and len(self._loaded) == len(variables):
            summed = {id(variable) for variable in self._summed()}
            for variable, values in zip(variables, self._loaded, strict=True):
                is_summed = id(variable) in summed
                variable.assign(_value_of_rank(variable, values, self._engine) if is_summed else values[0])
            self._start = {}  # what all had in common is rank 0's

    @property
    def is_incomplete(self) -> bool:
        """Whether the loaded state has metrics that the model has not made yet."""
        return self._loaded is not None and len(self._loaded) != len(self._model.metrics_variables)

    def forget(self) -> None:
        """Drops the loaded state."""
        self._loaded = None


def _value_of_rank(variable: keras.Variable, shares: Any, engine: Engine) -> Any:
    """Returns this rank's part of a state that was saved by any number of ranks."""
    if len(shares) == engine.size:
        return shares[engine.rank]
    if variable.aggregation == "mean":
        return shares.mean(axis=0)
    total = shares.any(axis=0) if shares.dtype == bool else shares.sum(axis=0, dtype=shares.dtype)
    return total if engine.rank == 0 else np.zeros_like(total)


def _numeric(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.int32) if value.dtype == tf.bool else tf.convert_to_tensor(value)
