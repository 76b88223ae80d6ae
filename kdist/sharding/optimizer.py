"""A Keras optimizer whose slots are parts: it is built with this rank's part of each weight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.engines.arrays.buckets import PARTS_MB, assign_buckets
from kdist.engines.arrays.fusion import part_bounds
from kdist.engines.engine import Engine
from kdist.errors import StrategyError
from kdist.keras_hooks.layers.embedding import table_of
from kdist.keras_hooks.optimizers import (
    exclude_alike,
    is_elementwise,
    moving_averages,
    recorded_slots,
    set_trained_variables,
)
from kdist.keras_hooks.patching import patch
from kdist.keras_hooks.variables import key_of, path_of, raw_variable
from kdist.sharding.blocks import filled, row_blocks, sent_to
from kdist.sharding.part import Part, SlotPart, make_parts
from kdist.sharding.part_updates import PartUpdates
from kdist.sharding.refusals import check_optimizer, check_shared_variables, check_table_optimizer, check_weights
from kdist.sharding.slot_files import save_whole_slots
from kdist.sharding.table import Table
from kdist.state.part import BLOCK, DeferredArray
from kdist.state.variables import SLOTS_IN_PARTS, slots_in_parts


class ShardedOptimizer:
    """The parts of one optimizer's weights and slots.

    Elementwise optimizers, almost all of Keras' own, update a range of each weight on every rank. With any other each
    weight has one rank that updates all of it; on the others its part has no rows. Of a table in parts
    (`shard_embeddings`) every rank updates the rows that it holds.

    Args:
        optimizer: `keras.optimizers.Optimizer`, an innermost one that is not built.
        engine: `Engine`.

    Attributes:
        engine: `Engine`.
        parts: dict of `Part` by the keys of the weights that are whole on each rank.
        loads: pair, how many files were loaded into the parts, and a checksum of the last; the same on all ranks.

    Raises:
        StrategyError: if the optimizer cannot update parts.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, engine: Engine) -> None:
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self.engine = engine
        self.parts: dict[int, Part] = {}
        self.loads: tuple[int, int | None] = 0, None
        self._part_variables: dict[int, Any] = {}  # by the weights' keys: what the optimizer updates, in its order
        self._slots: dict[int, tuple[Any, Part]] = {}  # by id, with the variable, so that the id stays unique
        self._table_slots: dict[int, tuple[Any, Table]] = {}  # by id: the slots of tables in parts
        self._shapes: dict[int, list[int]] | None = None

    def install(self) -> None:
        """Sets the methods on the instance, for its life."""
        methods = {
            "build": self._build,
            "finalize_variable_values": self._finalize,
        }
        for name, method in methods.items():
            patch(self.optimizer, name, method)
        vars(self.optimizer)[SLOTS_IN_PARTS] = self

    def part_variables(self, weights: Sequence[Any] | None = None) -> list[Any]:
        """Returns the variables that the optimizer updates in place of weights, by default of all its weights."""
        if weights is None:
            return list(self._part_variables.values())
        self._check_known(weights)
        return [self._part_variables[key_of(weight)] for weight in weights]

    def parts_of(self, weights: Sequence[Any]) -> list[Part]:
        """Returns the parts of weights that are whole on each rank."""
        self._check_known(weights)
        return [self.parts[key_of(weight)] for weight in weights]

    def _check_known(self, weights: Sequence[Any]) -> None:
        unknown = [path_of(weight) for weight in weights if key_of(weight) not in self._part_variables]
        if unknown:
            raise StrategyError(
                f"The optimizer was built with other weights. Received: {unknown[0]!r} in "
                f"{type(self.optimizer).__name__}, as after layers were unfrozen. Expected the weights of its first "
                "step. Fix: pass a new optimizer to model.compile()."
            )

    def gather(self) -> None:
        """Sets every weight to what the ranks have made of its parts, and frees these.

        Collective: every rank must call this, in the same order.
        """
        parts = list(self.parts.values())
        for bucket in assign_buckets([part.num_bytes for part in parts], PARTS_MB):
            self.gather_some([parts[place] for place in bucket])

    def gather_some(self, parts: Sequence[Part]) -> list[Any]:
        """Sets the weights of some parts to what the ranks have made of these, and frees the parts.

        Collective: every rank must call this, in the same order.

        Args:
            parts: sequence of `Part`.

        Returns:
            A list of a graph's operations that set the weights.
        """
        updated = [tf.convert_to_tensor(raw_variable(part.variable)) for part in parts]
        received = self.engine.allgather(updated, [part.lengths for part in parts])
        assigned = []
        for part, value in zip(parts, received, strict=True):
            raw = raw_variable(part.weight)
            assigned.append(raw.assign(tf.reshape(value, raw.shape), read_value=False))
            part.free()
        return assigned

    def updates_of(self, weights: Sequence[Any]) -> PartUpdates:
        """Returns how weights are updated and gathered in turn.

        Args:
            weights: sequence of those that an update has gradients of, in its order.
        """
        parts = [self.parts[key_of(weight)] for weight in weights if table_of(weight) is None]
        return PartUpdates(parts, self.gather_some, PARTS_MB)

    def free(self) -> None:
        """Gives the memory of the parts back; weights stay as they are."""
        for part in self.parts.values():
            part.free()

    # Slots; see `SlotsInParts`.

    def has(self, variable: Any) -> bool:
        """Returns whether a variable is a slot of which this rank holds its part."""
        return id(variable) in self._slots or id(variable) in self._table_slots

    def shape(self, variable: Any) -> list[int]:
        """Returns the shape of the whole slot.

        Collective: every rank must call this, in the same order.
        """
        if id(variable) in self._table_slots:
            return self._table_slots[id(variable)][1].shape(variable)
        if self._shapes is None:
            slots = [slot for slot, _ in self._slots.values()]
            by_rank = self.engine.gather_objects([list(slot.shape) for slot in slots])
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
        if id(variable) in self._table_slots:
            return self._table_slots[id(variable)][1].whole(variable)
        part, shape = self._slots[id(variable)][1], self.shape(variable)
        value = tf.reshape(tf.convert_to_tensor(raw_variable(variable)), [-1])
        if not part.is_cut and part.stop == part.start:
            value = value[:0]
        (gathered,) = self.engine.allgather([value])
        return np.reshape(gathered.numpy(), shape)

    def blocks(self, variable: Any, receivers: list[int]) -> Iterator[tuple[int, Any]]:
        """Yields blocks of the whole slot; see `SlotsInParts.blocks`.

        Collective: every rank must iterate over this, in the same order.
        """
        if id(variable) in self._table_slots:
            yield from self._table_slots[id(variable)][1].blocks(variable, receivers)
            return
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
        """Sets a slot to this rank's part of the whole one, an array, an open HDF5 dataset or a `DeferredArray`.

        Collective, if it is deferred: every rank must call this, in the same order.
        """
        if id(variable) in self._table_slots:
            self._table_slots[id(variable)][1].assign(variable, array)
            return
        part, raw = self._slots[id(variable)][1], raw_variable(variable)
        if tuple(raw.shape) == tuple(part.variable.shape):
            shape = tuple(part.weight.shape)
            if tuple(array.shape) != shape:
                raise ValueError(
                    f"The shape of the value is not that of the slot. Received: a value of shape {tuple(array.shape)} "
                    f"for {path_of(variable)!r}. Expected the shape of its weight, {shape}."
                )
            if shape != part.view:
                raw.assign(np.reshape(np.asarray(array), part.view)[part.start : part.stop])
            elif isinstance(array, DeferredArray):
                blocks = (block[max(part.start - at, 0) : max(part.stop - at, 0)] for at, block in row_blocks(array))
                raw.assign(filled(raw.shape, raw.dtype, blocks))
            else:
                raw.assign(np.asarray(array[part.start : part.stop]))
            return
        whole = np.asarray(array)
        if part.stop > part.start:
            raw.assign(np.reshape(whole, raw.shape))

    # The optimizer's methods.

    def _build(self, variables: Any) -> None:
        optimizer, weights = self.optimizer, list(variables)
        if optimizer.built:
            return
        check_weights(optimizer, weights)
        tables = {id(table_of(weight).rows): table_of(weight) for weight in weights if table_of(weight) is not None}
        if tables:
            check_table_optimizer(optimizer)
        with tf.init_scope():
            whole = [weight for weight in weights if table_of(weight) is None]
            parts = make_parts(whole, self.engine.size, self.engine.rank, is_elementwise=is_elementwise(optimizer))
            self.parts = {key_of(part.weight): part for part in parts}
            self._part_variables = {
                key_of(weight): self.parts[key_of(weight)].variable if table is None else table.rows
                for weight, table in zip(weights, map(table_of, weights), strict=True)
            }
            exclude_alike(optimizer, list(zip(weights, self.part_variables(), strict=True)))
            for part in parts:
                part.load()  # some optimizers copy the weights
            by_variable = {id(part.variable): part for part in parts}
            for slot, variable in recorded_slots(optimizer, self.part_variables()):
                patch(slot, "__class__", SlotPart)
                if id(variable) in tables:
                    self._table_slots[id(slot)] = slot, tables[id(variable)]
                else:
                    self._slots[id(slot)] = slot, by_variable[id(variable)]
            self.free()
        check_shared_variables(optimizer, [slot for slot, _ in self._slots.values()])
        set_trained_variables(optimizer, weights)

    def _finalize(self, var_list: Any) -> None:
        """Sets weights to their moving averages. Collective: every rank must call this, in the same order."""
        if not self.optimizer.use_ema:
            return
        for weight, average in moving_averages(self.optimizer):
            if average is None:
                continue
            is_of_table = table_of(weight) is not None
            raw_variable(weight).assign(raw_variable(average) if is_of_table else self.whole(average))


def sharded(optimizer: keras.optimizers.Optimizer) -> ShardedOptimizer | None:
    """Returns what shards an optimizer, or its inner one; `None` if nothing does."""
    found = slots_in_parts(optimizer)
    return found if isinstance(found, ShardedOptimizer) else None


def shard(optimizer: keras.optimizers.Optimizer, engine: Engine) -> None:
    """Makes an optimizer hold its slots in parts; a second call has no effect."""
    # While it is made, an optimizer with a loss scale has no inner one yet.
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and sharded(optimizer) is None:
        ShardedOptimizer(optimizer, engine).install()
    save_whole_slots(optimizer)
