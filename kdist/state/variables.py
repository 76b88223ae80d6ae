"""The variables of a model, its optimizers and its seed generators: the state that is whole on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.engines.tensors import flat
from kdist.errors import CheckpointError
from kdist.keras_hooks.layers.embedding import table_of
from kdist.keras_hooks.layers.parts import Holder, holder_of
from kdist.keras_hooks.optimizers import innermost, optimizers_of, trained_variables
from kdist.keras_hooks.trainer import seed_generators
from kdist.keras_hooks.variables import raw_variable
from kdist.state.part import MODEL, DeferredArray, State, StatePart

SHARDED_SLOTS = "_kdist_sharded_slots"
"""The attribute of an innermost optimizer with what shards its slots, if something does."""

FIX_OF_UNTRACKED = "make each a keras.Variable that is an attribute of the model, as Keras tracks no tf.Variable"
"""What to do about variables that the model does not track."""


def sharded_slots(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns what shards slots of an optimizer, or of its inner one; `None` if all are whole."""
    return vars(innermost(optimizer)).get(SHARDED_SLOTS)


class ModelState(StatePart):
    """The state of a model and its optimizers, without metrics."""

    name = MODEL

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def variables(self) -> list[Any]:
        """Returns weights, statistics, optimizer variables and seeds, each once, in the same order on all ranks.

        Variables of which each rank has its part are not among them.
        """
        return [variable for variable, holder in self._all() if holder is None]

    def numeric(self) -> list[Any]:
        """Returns the variables without those of strings."""
        return [variable for variable in self.variables() if variable.dtype != "string"]

    @property
    def is_in_parts(self) -> bool:
        """See `StatePart.is_in_parts`."""
        has_tables = any(table_of(variable) is not None for variable in self._model.variables)
        return has_tables or any(sharded_slots(each) is not None for each in optimizers_of(self._model))

    @property
    def untracked(self) -> list[str]:
        """The names of variables that an optimizer updates and the model does not track: they are not saved."""
        tracked = {_key(variable) for variable in self._model.variables}
        trained = [each for optimizer in optimizers_of(self._model) for each in trained_variables(innermost(optimizer))]
        return [getattr(each, "path", each.name) for each in trained if _key(each) not in tracked]

    def _all(self) -> list[tuple[Any, Holder | None]]:
        """Returns all variables, each with what holds it in parts."""
        model = self._model
        slots = [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]
        seeds = [generator.state for generator in seed_generators(model)]
        every = {id(variable): variable for variable in (*model.variables, *slots, *seeds)}
        return [(variable, holder_of(variable)) for variable in every.values()]

    def _saved(self) -> list[tuple[Any, Holder | None]]:
        return [each for each in self._all() if each[0].dtype != "string"]

    def state_dict(self) -> State:
        """Returns all variables, bit for bit; those in parts as `DeferredArray`."""
        saved = self._saved()
        return {
            "variables": _described(saved),
            "optimizers": [_built_with(each, self._model) for each in optimizers_of(self._model)],
            "untracked": self.untracked,
            **{f"variable/{place}": _value(*each) for place, each in enumerate(saved)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` has returned; raises `CheckpointError` if it was another model's."""
        variables = self._model.variables
        for optimizer, places in zip(optimizers_of(self._model), state["optimizers"], strict=False):
            if places and not innermost(optimizer).built and max(places) < len(variables):
                optimizer.build([variables[place] for place in places])
        saved = self._saved()
        before, now = state["variables"], _described(saved)
        if before != now and (untracked := state.get("untracked")):  # not in files of kdist 0.2
            raise CheckpointError(
                "The checkpoint is of a training that cannot be resumed: the optimizer was built for variables that "
                f"the model does not track, which are not saved. Received: {', '.join(untracked)}. Expected model "
                f"variables alone. Fix: {FIX_OF_UNTRACKED}, and train from the beginning with another backup_dir."
            )
        if before != now:
            differing = next(
                (pair for pair in zip(before, now, strict=False) if pair[0] != pair[1]), (len(before), len(now))
            )
            raise CheckpointError(
                f"The checkpoint is of another model or optimizer. Received: {len(before)} variables, and "
                f"{differing[0]} where this model, with {len(now)}, has {differing[1]}. Expected the model and the "
                "optimizer that were saved. Fix: use another backup_dir, or delete this one to train from the "
                "beginning."
            )
        for place, (variable, holder) in enumerate(saved):
            raw, value = raw_variable(variable), state[f"variable/{place}"]
            if holder is None or np.dtype(raw.dtype.as_numpy_dtype).isbuiltin != 1:
                value = _from_bytes(np.asarray(value), raw.dtype, now[place][0])
            if holder is None:
                raw.assign(value)
            else:
                holder.assign(variable, value)


def _described(saved: Sequence[tuple[Any, Holder | None]]) -> list[Any]:
    # Without paths: Keras numbers automatic names.
    return [
        [list(each.shape) if holder is None else holder.shape(each), keras.backend.standardize_dtype(each.dtype)]
        for each, holder in saved
    ]


def _value(variable: Any, holder: Holder | None) -> Any:
    if holder is None:
        return _as_bytes(flat.to_array(tf.convert_to_tensor(variable)))
    shape, dtype = holder.shape(variable), np.dtype(raw_variable(variable).dtype.as_numpy_dtype)
    if dtype.isbuiltin != 1:  # as bytes
        return DeferredArray(
            [math.prod(shape) * dtype.itemsize], np.uint8, lambda receivers: _byte_blocks(holder, variable, receivers)
        )
    return DeferredArray(shape, dtype, lambda receivers: _blocks(holder, variable, receivers))


def _blocks(holder: Holder, variable: Any, receivers: Sequence[int] | None) -> Iterator[Any]:
    for _, block in holder.blocks(variable, list(range(holder.engine.size) if receivers is None else receivers)):
        yield block


def _byte_blocks(holder: Holder, variable: Any, receivers: Sequence[int] | None) -> Iterator[Any]:
    return (_as_bytes(block) for block in _blocks(holder, variable, receivers))


def _built_with(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> list[int] | None:
    places = {_key(variable): place for place, variable in enumerate(model.variables)}
    trained = [_key(each) for each in trained_variables(innermost(optimizer))]
    return [places[key] for key in trained] if trained and all(key in places for key in trained) else None


def _key(variable: Any) -> int:
    """Returns what a variable of Keras and TensorFlow's own in it share."""
    return id(variable) if table_of(variable) is not None else id(raw_variable(variable))


def _as_bytes(array: Any) -> Any:
    """Returns an array, as bytes if its dtype is not NumPy's own (`bfloat16`)."""
    return array if array.dtype.isbuiltin == 1 else np.frombuffer(array.tobytes(), np.uint8)


def _from_bytes(array: Any, dtype: Any, shape: Any) -> Any:
    numpy_dtype = np.dtype(dtype.as_numpy_dtype)
    return array if numpy_dtype.isbuiltin == 1 else np.frombuffer(array.tobytes(), numpy_dtype).reshape(shape)
