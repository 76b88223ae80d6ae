"""A checkpoint that one rank has read, on all ranks: the others may have no access to its disk or its memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from kdist.checkpoint.storage.files import Checkpoint
from kdist.engines.engine import Engine
from kdist.state.broadcast import broadcast_arrays
from kdist.state.part import DeferredArray, State, rows_of_block


def broadcast_checkpoint(
    engine: Engine, checkpoint: Checkpoint | None, *, root: int = 0, one_by_one: Collection[str] = ()
) -> Checkpoint | None:
    """Returns the root's checkpoint on every rank; arrays of some parts are sent when they are read, one by one.

    Collective: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks communicate.
        checkpoint: `Checkpoint` or `None`, read on the root only.
        root: int, the rank that has it.
        one_by_one: collection of str, the names of these parts.
    """
    parts = {} if checkpoint is None else checkpoint
    flat = {f"{part}/{name}": value for part, state in parts.items() for name, value in state.items()}
    late = {key: value for key, value in flat.items() if key.partition("/")[0] in one_by_one and _is_array(value)}
    at_once = {key: np.asarray(each) if _is_array(each) else each for key, each in flat.items() if key not in late}
    received = broadcast_arrays(engine, None if checkpoint is None else at_once, root)
    if received is None:
        return None
    described = [[key, list(value.shape), value.dtype.str] for key, value in late.items()]
    for key, shape, dtype in engine.broadcast_object(described, root):
        received[key] = _sent_when_read(engine, late.get(key), tuple(shape), np.dtype(dtype), root)
    result: dict[str, State] = {}
    for key, value in received.items():
        part, _, name = key.partition("/")
        result.setdefault(part, {})[name] = value
    return result


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, DeferredArray))


def _sent_when_read(
    engine: Engine, of_the_root: Any, shape: tuple[int, ...], dtype: np.dtype[Any], root: int
) -> DeferredArray:
    def send(_: object) -> Iterator[Any]:
        own = None if of_the_root is None else _blocks(of_the_root)
        rows, number = rows_of_block(shape, dtype), shape[0] if shape else 1
        for _ in range(0, number, rows):
            received = broadcast_arrays(engine, None if own is None else {"block": next(own)}, root)
            yield (received or {})["block"]

    return DeferredArray(shape, dtype, send)


def _blocks(array: Any) -> Iterator[Any]:
    """Yields blocks of an array that only this rank reads."""
    if isinstance(array, DeferredArray):
        yield from array.blocks()
        return
    rows = rows_of_block(array.shape, array.dtype)
    whole = np.atleast_1d(array)
    for start in range(0, len(whole), rows):
        yield whole[start : start + rows]
