"""Slots: tensors beside a model's variables, such as residuals and velocities, that last from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from kdist.engines.tensors.unlifted import unlifted_variable
from kdist.state.part import Placement, State, StatePart


class Slots:
    """One tensor for each of a model's variables, on this rank only."""

    def __init__(self, initial: Callable[[Sequence[int], tf.DType], tf.Tensor]) -> None:
        self._initial = initial
        self._slots: dict[int, tuple[Any, tf.Variable]] = {}  # with the model's variable, so that its id stays unique
        self._loaded: dict[int, npt.NDArray[Any]] = {}  # for slots that are not made yet

    @property
    def values(self) -> dict[int, tf.Variable]:
        """The tensors, by the ids of the model's variables."""
        return {key: each for key, (_, each) in self._slots.items()}

    def get(self, variable: Any, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
        """Returns the slot of a variable, which the first call makes."""
        if id(variable) not in self._slots:
            with tf.init_scope():
                made = unlifted_variable(self._initial_value(id(variable), shape, dtype))
            self._slots[id(variable)] = variable, made
        return self._slots[id(variable)][1]

    def load(self, arrays: Mapping[int, npt.NDArray[Any]]) -> None:
        """Sets all slots, those that are not made yet too, to arrays by variable id, or else to their first values."""
        self._loaded = dict(arrays)
        for key, each in self.values.items():
            each.assign(self._initial_value(key, each.shape.as_list(), each.dtype))

    def _initial_value(self, key: int, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
        given = self._loaded.pop(key, None)
        if given is not None and (given.shape, given.dtype) == (tuple(shape), np.dtype(dtype.as_numpy_dtype)):
            return tf.constant(given)
        return self._initial(shape, dtype)


class HasSlots(Protocol):
    """An object with slots. Its state is a dict by kind of dicts of arrays by variable id."""

    def state_dict(self) -> dict[str, dict[int, Any]]:
        """Returns the slots of all ranks together. Collective: every rank must call this, in the same order."""
        ...

    def load_state_dict(self, state: Mapping[str, Mapping[int, Any]]) -> None:
        """Loads what `state_dict` has returned; other slots are reset."""
        ...


class SlotState(StatePart):
    """The slots beside a model's variables as a part of the state."""

    name = "slots"
    placement = Placement.PER_RANK

    def __init__(self, model: keras.Model, holder: HasSlots) -> None:
        self._model = model
        self._holder = holder

    def state_dict(self) -> State:
        """Returns the slots by kind and index of the variable."""
        places = {id(variable): place for place, variable in enumerate(self._model.variables)}
        return {
            f"{kind}/{places[key]}": value
            for kind, values in self._holder.state_dict().items()
            for key, value in values.items()
            if key in places
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` has returned."""
        variables = self._model.variables
        kinds: dict[str, dict[int, Any]] = {}
        for name, value in state.items():
            kind, _, place = name.partition("/")
            if int(place) < len(variables):
                kinds.setdefault(kind, {})[id(variables[int(place)])] = value
        self._holder.load_state_dict(kinds)
