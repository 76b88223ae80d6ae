"""Sharded slots, saved whole and loaded from what is whole."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.layers.parts import holder_of
from kdist.keras_hooks.layers.stores import open_array
from kdist.keras_hooks.patching import original, patch
from kdist.sharding.blocks import checksum
from kdist.sharding.row_files import save_rows
from kdist.state.variables import sharded_slots


def save_whole_slots(optimizer: keras.optimizers.Optimizer) -> None:
    """Lets an optimizer save whole slots, and load from what is whole; a second call has no effect."""
    for name, method in (("save_own_variables", _save), ("load_own_variables", _load)):
        if getattr(vars(optimizer).get(name), "func", None) is not method:
            patch(optimizer, name, functools.partial(method, optimizer))


def _save(optimizer: keras.optimizers.Optimizer, store: Any) -> None:
    """Saves whole slots, one after the other. Collective: every rank must call this, in the same order."""
    if sharded_slots(optimizer) is None:
        original(optimizer, "save_own_variables")(store)
        return
    for place, variable in enumerate(optimizer.variables):
        holder = holder_of(variable)
        if holder is None:
            store[str(place)] = variable.numpy()
        else:
            save_rows(store, str(place), variable, holder)


def _load(optimizer: keras.optimizers.Optimizer, store: Mapping[str, Any]) -> None:
    """Loads this rank's parts of whole slots."""
    parts, variables = sharded_slots(optimizer), optimizer.variables
    if parts is None or len(store.keys()) != len(variables):
        original(optimizer, "load_own_variables")(store)  # which warns of another number
        return
    found = 0
    for place, variable in enumerate(variables):
        holder = holder_of(variable)
        if holder is None:
            variable.assign(store[str(place)])
        else:
            array = open_array(store, str(place))
            holder.assign(variable, array)
            found = checksum(array, tf.as_dtype(variable.dtype), found)  # of all of it, so that ranks can compare
    parts.loads = parts.loads[0] + 1, found


def loads(optimizers: Sequence[keras.optimizers.Optimizer]) -> dict[str, int | None]:
    """Returns how many files were loaded into each optimizer's parts, and a checksum of the last, for a comparison."""
    found: dict[str, int | None] = {}
    for place, optimizer in enumerate(optimizers):
        if (parts := sharded_slots(optimizer)) is not None:
            name = f"{type(optimizer).__name__} ({place})"
            found[f"files loaded into {name}"], found[f"checksum of slots loaded into {name}"] = parts.loads
    return found
