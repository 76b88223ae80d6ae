"""Broadcasts of variables and arrays from one rank to all, a few at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.engines.arrays.buckets import assign_buckets
from kdist.engines.engine import Engine
from kdist.engines.tensors import flat
from kdist.engines.tensors.checksum import checksum, texts
from kdist.keras_hooks.variables import raw_variable

_BROADCAST_MB = 16.0  # size from which a message is sent


def broadcast_state(engine: Engine, variables: Sequence[Any], root: int = 0) -> list[Any]:
    """Sets variables that differ between the ranks to the root's values; the others are not sent.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks communicate.
        variables: sequence of `keras.Variable` or `tf.Variable`, the same on all ranks; of strings, too.
        root: int, the rank whose values are sent.

    Returns:
        The variables that differed, the same on all ranks.
    """
    if not variables or engine.size == 1:
        return []
    return broadcast_differing(engine, variables, gathered_checksums(engine, variables), root)


def broadcast_differing(engine: Engine, variables: Sequence[Any], checksums: np.ndarray, root: int = 0) -> list[Any]:
    """Does what `broadcast_state` does with the checksums of all ranks, of shape `(size, number of variables)`.

    Collective: every rank must call this, in the same order.
    """
    found = [variables[place] for place in np.flatnonzero((checksums != checksums[0]).any(axis=0)).tolist()]
    raw = [raw_variable(variable) for variable in found]
    numbers = [each for each in raw if each.dtype != tf.string]
    for index, value in broadcast_in_groups(engine, numbers, root):
        numbers[index].assign(value)
    for each in raw:
        if each.dtype == tf.string:
            sent = engine.broadcast_object(texts(tf.convert_to_tensor(each)), root)
            each.assign(tf.reshape(tf.constant([text.encode("latin-1") for text in sent]), each.shape))
    return found


def gathered_checksums(engine: Engine, variables: Sequence[Any]) -> np.ndarray:
    """Returns a checksum of each variable's bytes, of shape `(size, number of variables)`.

    Collective: every rank must call this, in the same order.
    """
    return np.asarray(engine.allgather([tf.constant([checksums_of(variables)], tf.int64)])[0])


def checksums_of(variables: Sequence[Any]) -> list[int]:
    """Returns a checksum of each variable's bytes on this rank."""
    return [checksum(tf.convert_to_tensor(raw_variable(each))) for each in variables]


def broadcast_in_groups(engine: Engine, values: Sequence[Any], root: int = 0) -> Iterator[tuple[int, tf.Tensor]]:
    """Yields the root's values with their indices, in groups: one message of all weights would double the memory.

    Collective: every rank must call this, in the same order, and iterate to the end.
    """
    sizes = [math.prod(each.shape) * tf.as_dtype(each.dtype).size for each in values]
    for group in assign_buckets(sizes, _BROADCAST_MB):
        received = engine.broadcast([tf.convert_to_tensor(values[index]) for index in group], root=root)
        yield from zip(group, received, strict=True)


def broadcast_arrays(engine: Engine, local: Mapping[str, Any] | None, root: int = 0) -> dict[str, Any] | None:
    """Returns the root's values and arrays on every rank.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks communicate.
        local: mapping of names to NumPy arrays and to what JSON can write, or `None`; read on the root only.
        root: int, the rank that has them.
    """
    if engine.size == 1:
        return None if local is None else dict(local)
    arrays = {name: value for name, value in (local or {}).items() if isinstance(value, np.ndarray)}
    values = None if local is None else {name: value for name, value in local.items() if name not in arrays}
    kinds = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    values, kinds = engine.broadcast_object([values, kinds], root)
    if values is None:
        return None
    sent = [
        arrays[name] if engine.rank == root and name in arrays else np.zeros(shape, dtype)
        for name, dtype, shape in kinds
    ]
    received = {kinds[place][0]: flat.to_array(value) for place, value in broadcast_in_groups(engine, sent, root)}
    return values | received
