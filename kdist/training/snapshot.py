"""A training between two steps as numbers and arrays, and a model put back to where it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.engines import flat
from kdist.engines.engine import Engine
from kdist.errors import CheckpointError
from kdist.training.checkpoint_files import Checkpoint
from kdist.training.optimizers import innermost, optimizers_of
from kdist.training.state import broadcast_by_groups, variables_of


def take_model(model: keras.Model) -> Checkpoint:
    """Returns all that a model and its optimizers are made of, bit for bit; metrics are not among it."""
    variables = [variable for variable in variables_of(model) if variable.dtype != "string"]
    arrays = [flat.to_array(tf.convert_to_tensor(variable)) for variable in variables]
    return Checkpoint(
        {"variables": _described(variables), "optimizers": [_built_with(each, model) for each in optimizers_of(model)]},
        {f"variable/{place}": _as_bytes(array) for place, array in enumerate(arrays)},
    )


def give_model(model: keras.Model, saved: Checkpoint) -> None:
    """Puts a model back to what `take_model` has returned.

    Raises:
        CheckpointError: if it was another model.
    """
    for optimizer, places in zip(optimizers_of(model), saved.state["optimizers"], strict=False):
        if places is not None and not innermost(optimizer).built:
            optimizer.build([model.variables[place] for place in places])
    variables = [variable for variable in variables_of(model) if variable.dtype != "string"]
    before, now = saved.state["variables"], _described(variables)
    if before != now:
        differing = next(
            (pair for pair in zip(before, now, strict=False) if pair[0] != pair[1]), (len(before), len(now))
        )
        raise CheckpointError(
            f"A checkpoint is another model's or another optimizer's. Received: {len(before)} variables, and "
            f"{differing[0]} where this model, with {len(now)}, has {differing[1]}. Expected the model and the "
            "optimizer that were saved. Fix: another backup_dir for another model, or delete this one to train from "
            "the beginning."
        )
    for place, variable in enumerate(variables):
        raw = variable.value if isinstance(variable, keras.Variable) else variable
        raw.assign(_from_bytes(saved.arrays[f"variable/{place}"], raw.dtype, raw.shape))


def same_everywhere(engine: Engine, mine: Checkpoint | None) -> Checkpoint | None:
    """Returns the chief's checkpoint on every rank: the others may not see its disk.

    Collective: every rank must call this, in the same order.
    """
    names = list(mine.arrays) if mine is not None else []
    kinds = [[str(mine.arrays[name].dtype), list(mine.arrays[name].shape)] for name in names] if mine else []
    state, names, kinds = engine.broadcast_object([mine.state if mine else None, names, kinds])
    if state is None:
        return None
    given = [
        mine.arrays[name] if engine.rank == 0 and mine else np.zeros(shape, dtype)
        for name, (dtype, shape) in zip(names, kinds, strict=True)
    ]
    arrays = dict(broadcast_by_groups(engine, given))
    return Checkpoint(state, {name: flat.to_array(arrays[place]) for place, name in enumerate(names)})


def without_prefix(arrays: Mapping[str, Any], prefix: str) -> list[Any]:
    """Returns the arrays of a numbered kind, in order."""
    found = {int(name.removeprefix(prefix)): array for name, array in arrays.items() if name.startswith(prefix)}
    return [found[place] for place in sorted(found)]


def _described(variables: Sequence[Any]) -> list[Any]:
    # Not by path: Keras numbers names that nobody gave.
    return [[list(variable.shape), keras.backend.standardize_dtype(variable.dtype)] for variable in variables]


def _built_with(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> list[int] | None:
    places = {id(variable): place for place, variable in enumerate(model.variables)}
    trained = getattr(innermost(optimizer), "_trainable_variables", None) or []
    return [places[id(v)] for v in trained] if trained and all(id(v) in places for v in trained) else None


def _as_bytes(array: Any) -> Any:
    """Returns an array of NumPy's own dtypes: those of others, `bfloat16` say, as their bytes."""
    return array if array.dtype.isbuiltin == 1 else np.frombuffer(array.tobytes(), np.uint8)


def _from_bytes(array: Any, dtype: Any, shape: Any) -> Any:
    own = dtype.as_numpy_dtype
    return array if np.dtype(own).isbuiltin == 1 else np.frombuffer(array.tobytes(), own).reshape(shape)
