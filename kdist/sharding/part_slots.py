"""The slots of an optimizer that updates a part of each weight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.engines.arrays.fusion import part_bounds
from kdist.engines.engine import Engine
from kdist.keras_hooks.variables import path_of, raw_variable
from kdist.sharding.blocks import filled, row_blocks, sent_to
from kdist.sharding.part import Part, hold
from kdist.state.part import BLOCK, DeferredArray


class PartSlots:
    """This rank's parts of slots; see `Holder`.

    Args:
        engine: `Engine`, of all ranks.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._slots: dict[int, tuple[Any, Part]] = {}  # by id, with the slot, so that the id stays unique
        self._shapes: dict[int, list[int]] | None = None

    def add(self, slot: Any, part: Part) -> None:
        """Adds a slot of a part of a weight, before the first use."""
        self._slots[id(slot)] = slot, part
        hold(slot, self)

    def shape(self, variable: Any) -> list[int]:
        """Returns the shape of the whole slot.

        Collective: every rank must call this, in the same order.
        """
        if self._shapes is None:
            by_rank = self.engine.gather_objects([list(slot.shape) for slot, _ in self._slots.values()])
            owners = self.engine.gather_objects([part.stop > part.start for _, part in self._slots.values()])
            self._shapes = {}
            for place, (slot, part) in enumerate(self._slots.values()):
                owner = next((rank for rank, has_rows in enumerate(owners) if has_rows[place]), 0)
                # A weight without dimensions is updated as one of one number.
                is_like = tuple(slot.shape) == tuple(part.variable.shape)
                if not part.is_cut:
                    is_like = by_rank[owner][place] == list(part.view)
                self._shapes[id(slot)] = list(part.weight.shape) if is_like else by_rank[owner][place]
        return self._shapes[id(variable)]

    def whole(self, variable: Any) -> Any:
        """Returns the whole slot, an array.

        Collective: every rank must call this, in the same order.
        """
        part, shape = self._slots[id(variable)][1], self.shape(variable)
        value = tf.reshape(tf.convert_to_tensor(raw_variable(variable)), [-1])
        if not part.is_cut and part.stop == part.start:
            value = value[:0]
        (gathered,) = self.engine.allgather([value])
        return np.reshape(gathered.numpy(), shape)

    def blocks(self, variable: Any, receivers: list[int]) -> Iterator[tuple[int, Any]]:
        """Yields blocks of the whole slot; see `Holder.blocks`.

        Collective: every rank must iterate over this, in the same order.
        """
        part, shape, engine = self._slots[id(variable)][1], self.shape(variable), self.engine
        if not part.is_cut or list(part.view) != shape or not shape:
            yield 0, np.atleast_1d(self.whole(variable))
            return
        raw, step = raw_variable(variable), max(1, BLOCK // (math.prod(shape[1:]) * raw_variable(variable).dtype.size))
        bounds = part_bounds(shape[0], engine.size)
        for rank, first in enumerate(bounds[:-1]):
            for start in range(first, bounds[rank + 1], step):
                place = start - first if rank == engine.rank else 0
                rows = min(step, bounds[rank + 1] - start) if rank == engine.rank else 0
                yield start, sent_to(receivers, raw[place : place + rows], engine)

    def assign(self, variable: Any, array: Any) -> None:
        """Sets a slot to this rank's part of the whole one; see `Holder.assign`.

        Collective, if the array is deferred: every rank must call this, in the same order.
        """
        part, raw = self._slots[id(variable)][1], raw_variable(variable)
        if tuple(raw.shape) != tuple(part.variable.shape):  # not of the weight's shape
            whole = np.asarray(array)
            if part.stop > part.start:
                raw.assign(np.reshape(whole, raw.shape))
            return
        shape = tuple(part.weight.shape)
        if tuple(array.shape) != shape:
            raise ValueError(
                f"The shape of the value is not that of the slot. Received: a value of shape {tuple(array.shape)} "
                f"for {path_of(variable)!r}. Expected the shape of its weight, {shape}. Fix: assign the whole slot, or "
                "load a file of the same model."
            )
        if shape != part.view:
            raw.assign(np.reshape(np.asarray(array), part.view)[part.start : part.stop])
        elif isinstance(array, DeferredArray):
            blocks = (block[max(part.start - at, 0) : max(part.stop - at, 0)] for at, block in row_blocks(array))
            raw.assign(filled(raw.shape, raw.dtype, blocks))
        else:
            raw.assign(np.asarray(array[part.start : part.stop]))
