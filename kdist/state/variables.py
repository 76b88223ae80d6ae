"""The variables of a model, its optimizers and its seed generators: the state that is whole on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.engines.tensors import flat
from kdist.errors import CheckpointError
from kdist.keras_hooks.optimizers import innermost, optimizers_of, trained_variables
from kdist.keras_hooks.trainer import seed_generators
from kdist.keras_hooks.variables import raw_variable
from kdist.state.part import State, StatePart


class ModelState(StatePart):
    """The state of a model and its optimizers, without metrics."""

    name = "model"

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def variables(self) -> list[Any]:
        """Returns weights, statistics, optimizer variables and seeds, each once, in the same order on all ranks."""
        model = self._model
        found = {id(variable): variable for variable in model.variables}
        for optimizer in optimizers_of(model):
            found.update({id(variable): variable for variable in optimizer.variables})
        for generator in seed_generators(model):
            found.setdefault(id(generator.state), generator.state)
        return list(found.values())

    def numeric(self) -> list[Any]:
        """Returns the variables without those of strings."""
        return [variable for variable in self.variables() if variable.dtype != "string"]

    def state_dict(self) -> State:
        """Returns all variables, bit for bit."""
        variables = self.numeric()
        arrays = [flat.to_array(tf.convert_to_tensor(variable)) for variable in variables]
        return {
            "variables": _described(variables),
            "optimizers": [_built_with(each, self._model) for each in optimizers_of(self._model)],
            **{f"variable/{place}": _as_bytes(array) for place, array in enumerate(arrays)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` has returned; raises `CheckpointError` if it was another model's."""
        for optimizer, places in zip(optimizers_of(self._model), state["optimizers"], strict=False):
            if places is not None and not innermost(optimizer).built:
                optimizer.build([self._model.variables[place] for place in places])
        variables = self.numeric()
        before, now = state["variables"], _described(variables)
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
        for place, variable in enumerate(variables):
            raw = raw_variable(variable)
            raw.assign(_from_bytes(state[f"variable/{place}"], raw.dtype, raw.shape))


def _described(variables: Sequence[Any]) -> list[Any]:
    # Without paths: Keras numbers automatic names.
    return [[list(variable.shape), keras.backend.standardize_dtype(variable.dtype)] for variable in variables]


def _built_with(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> list[int] | None:
    places = {id(variable): place for place, variable in enumerate(model.variables)}
    trained = trained_variables(innermost(optimizer))
    return [places[id(v)] for v in trained] if trained and all(id(v) in places for v in trained) else None


def _as_bytes(array: Any) -> Any:
    """Returns an array, as bytes if its dtype is not NumPy's own (`bfloat16`)."""
    return array if array.dtype.isbuiltin == 1 else np.frombuffer(array.tobytes(), np.uint8)


def _from_bytes(array: Any, dtype: Any, shape: Any) -> Any:
    numpy_dtype = np.dtype(dtype.as_numpy_dtype)
    return array if numpy_dtype.isbuiltin == 1 else np.frombuffer(array.tobytes(), numpy_dtype).reshape(shape)
