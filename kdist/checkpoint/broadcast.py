"""A checkpoint that one rank has read, on all ranks: the others may have no access to its disk or its memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from kdist.checkpoint.files import Checkpoint
from kdist.engines.engine import Engine
from kdist.state.broadcast import broadcast_arrays
from kdist.state.part import DeferredArray, State


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
    for key in engine.broadcast_object(list(late), root):
        received[key] = _sent_when_read(engine, late.get(key), root)
    result: dict[str, State] = {}
    for key, value in received.items():
        part, _, name = key.partition("/")
        result.setdefault(part, {})[name] = value
    return result


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, DeferredArray))


def _sent_when_read(engine: Engine, of_the_root: Any, root: int) -> DeferredArray:
    def send() -> Any:
        local = None if of_the_root is None else {"array": np.asarray(of_the_root)}
        received = broadcast_arrays(engine, local, root)
        return (received or {})["array"]

    return DeferredArray(send)
