"""A Keras optimizer of a model with tables in parts: slots of a table have this rank's rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.keras_hooks.layers.embedding import table_of
from kdist.keras_hooks.optimizers import exclude_alike, moving_averages, recorded_slots, set_trained_variables
from kdist.keras_hooks.patching import original, patch
from kdist.keras_hooks.variables import raw_variable
from kdist.sharding.part import SlotPart
from kdist.sharding.refusals import check_table_optimizer
from kdist.sharding.slot_files import save_whole_slots
from kdist.sharding.table import Table
from kdist.state.variables import SLOTS_IN_PARTS


class TableOptimizer:
    """The slots of tables in one optimizer; see `SlotsInParts`.

    Args:
        optimizer: `keras.optimizers.Optimizer`, an innermost one.
        engine: `Engine`, of all ranks.

    Attributes:
        loads: pair, how many files were loaded into the slots, and a checksum of the last; the same on all ranks.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, engine: Engine) -> None:
        self._optimizer = optimizer
        self.engine = engine
        self.loads: tuple[int, int | None] = 0, None
        self._slots: dict[int, tuple[Any, Table]] = {}  # by id, with the variable, so that the id stays unique

    def has(self, variable: Any) -> bool:
        """Returns whether a variable is a slot of a table."""
        return id(variable) in self._slots

    def shape(self, variable: Any) -> list[int]:
        """Returns the shape of the whole slot."""
        return self._slots[id(variable)][1].shape(variable)

    def whole(self, variable: Any) -> Any:
        """Returns the whole slot, an array. Collective: every rank must call this, in the same order."""
        return self._slots[id(variable)][1].whole(variable)

    def blocks(self, variable: Any, receivers: list[int]) -> Iterator[tuple[int, Any]]:
        """See `SlotsInParts.blocks`."""
        return self._slots[id(variable)][1].blocks(variable, receivers)

    def assign(self, variable: Any, array: Any) -> None:
        """Sets a slot to this rank's rows of the whole one."""
        self._slots[id(variable)][1].assign(variable, array)

    def build(self, variables: Any) -> None:
        """Builds the optimizer; of a table it updates this rank's rows."""
        optimizer, weights = self._optimizer, list(variables)
        tables = [table_of(weight) for weight in weights]
        if optimizer.built or not any(tables):
            original(optimizer, "build")(weights)
            return
        check_table_optimizer(optimizer)
        updated = part_variables_of(weights)
        with tf.init_scope():
            exclude_alike(optimizer, list(zip(weights, updated, strict=True)))
            of = {id(rows): table for rows, table in zip(updated, tables, strict=True) if table is not None}
            for slot, variable in recorded_slots(optimizer, updated):
                if id(variable) in of:
                    patch(slot, "__class__", SlotPart)
                    self._slots[id(slot)] = slot, of[id(variable)]
        set_trained_variables(optimizer, weights)
        vars(optimizer)[SLOTS_IN_PARTS] = self

    def finalize(self, var_list: Any) -> None:
        """Sets weights to their moving averages."""
        if not self._slots:
            original(self._optimizer, "finalize_variable_values")(var_list)
        elif self._optimizer.use_ema:
            for weight, average in moving_averages(self._optimizer):
                if average is not None:
                    raw_variable(weight).assign(raw_variable(average))


def part_variables_of(weights: list[Any]) -> list[Any]:
    """Returns weights, and of a table the variable of this rank's rows."""
    return [weight if table_of(weight) is None else table_of(weight).rows for weight in weights]


def hold_rows(optimizer: keras.optimizers.Optimizer, engine: Engine) -> None:
    """Lets an optimizer update tables in parts; a second call has no effect."""
    # While it is made, an optimizer with a loss scale has no inner one yet.
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and "build" not in vars(optimizer):
        holder = TableOptimizer(optimizer, engine)
        patch(optimizer, "build", holder.build)
        patch(optimizer, "finalize_variable_values", holder.finalize)
    save_whole_slots(optimizer)
