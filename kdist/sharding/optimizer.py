"""A Keras optimizer whose slots are parts: it is built with this rank's part of each weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.engines.arrays.buckets import PARTS_MB, assign_buckets
from kdist.engines.engine import Engine
from kdist.errors import StrategyError
from kdist.keras_hooks.layers.embedding import table_of
from kdist.keras_hooks.layers.parts import holder_of
from kdist.keras_hooks.optimizers import (
    exclude_alike,
    is_elementwise,
    moving_averages,
    recorded_slots,
    set_trained_variables,
)
from kdist.keras_hooks.patching import original, patch
from kdist.keras_hooks.variables import key_of, path_of, raw_variable
from kdist.sharding.part import Part, hold, make_parts
from kdist.sharding.part_slots import PartSlots
from kdist.sharding.part_updates import PartUpdates
from kdist.sharding.refusals import check_optimizer, check_shared_variables, check_table_optimizer, check_weights
from kdist.sharding.slot_files import save_whole_slots
from kdist.sharding.table import part_variables_of
from kdist.state.variables import SHARDED_SLOTS, sharded_slots
from kdist.strategies.options import AllReduce


class ShardedOptimizer:
    """An optimizer with sharded slots, and the parts of its weights.

    Of a table in parts (`shard_embeddings`) every rank updates the rows that it holds. With `cuts_weights`
    (`shard="optimizer"`) all other weights have parts, too: elementwise optimizers, almost all of Keras' own, update a
    range of each on every rank. With any other optimizer each weight has one rank that updates all of it; on the others
    its part has no rows.

    Args:
        optimizer: `keras.optimizers.Optimizer`, an innermost one.
        engine: `Engine`, of all ranks.
        cuts_weights: bool, whether all weights have parts; else those that are no tables are updated as by plain Keras.

    Attributes:
        cuts_weights: bool, as given.
        parts: dict of `Part` by the keys of the weights that are whole on each rank.
        loads: pair, how many files were loaded into the parts, and a checksum of the last; the same on all ranks.

    Raises:
        StrategyError: if weights are to have parts, and the optimizer is built, or cannot update these.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, engine: Engine, *, cuts_weights: bool) -> None:
        if cuts_weights:
            check_optimizer(optimizer)
        self.optimizer = optimizer
        self.engine = engine
        self.cuts_weights = cuts_weights
        self.parts: dict[int, Part] = {}
        self.loads: tuple[int, int | None] = 0, None
        self._part_variables: dict[int, Any] = {}  # by the weights' keys: what the optimizer updates, in its order

    def install(self) -> None:
        """Sets the methods on the instance, for its life."""
        patch(self.optimizer, "build", self._build)
        patch(self.optimizer, "finalize_variable_values", self._finalize)
        if self.cuts_weights:
            vars(self.optimizer)[SHARDED_SLOTS] = self

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

    # The optimizer's methods.

    def _build(self, variables: Any) -> None:
        optimizer, weights = self.optimizer, list(variables)
        has_tables = any(map(table_of, weights))
        if optimizer.built or not (has_tables or self.cuts_weights):
            if not self.cuts_weights:
                original(optimizer, "build")(weights)
            return
        if self.cuts_weights:
            check_weights(optimizer, weights)
        if has_tables:
            check_table_optimizer(optimizer)
        with tf.init_scope():
            cut = [weight for weight in weights if self.cuts_weights and table_of(weight) is None]
            parts = make_parts(cut, self.engine.size, self.engine.rank, is_elementwise=is_elementwise(optimizer))
            self.parts = {key_of(part.weight): part for part in parts}
            of_parts = {key: part.variable for key, part in self.parts.items()}
            rows = part_variables_of(weights)
            updated = [of_parts.get(key_of(weight), each) for weight, each in zip(weights, rows, strict=True)]
            weight_of = {id(each): weight for each, weight in zip(updated, weights, strict=True)}
            self._part_variables = dict(zip(map(key_of, weights), updated, strict=True))
            exclude_alike(optimizer, list(zip(weights, updated, strict=True)))
            for part in parts:
                part.load()  # some optimizers copy the weights
            slots, part_slots = recorded_slots(optimizer, updated), PartSlots(self.engine)
            for slot, variable in slots:
                weight = weight_of[id(variable)]
                if key_of(weight) in self.parts:
                    part_slots.add(slot, self.parts[key_of(weight)])
                elif (table := table_of(weight)) is not None:
                    hold(slot, table)
            self.free()
        if self.cuts_weights:
            check_shared_variables(optimizer, [slot for slot, _ in slots])
        set_trained_variables(optimizer, weights)
        vars(optimizer)[SHARDED_SLOTS] = self

    def _finalize(self, var_list: Any) -> None:
        """Sets weights to their moving averages. Collective: every rank must call this, in the same order."""
        if SHARDED_SLOTS not in vars(self.optimizer):
            original(self.optimizer, "finalize_variable_values")(var_list)
        elif self.optimizer.use_ema:
            for weight, average in moving_averages(self.optimizer):
                if average is not None:
                    holder = holder_of(average) if key_of(weight) in self.parts else None
                    raw_variable(weight).assign(holder.whole(average) if holder else raw_variable(average))


def sharded(optimizer: keras.optimizers.Optimizer) -> ShardedOptimizer | None:
    """Returns what updates parts of the weights of an optimizer, or of its inner one; `None` if nothing does."""
    found: ShardedOptimizer | None = sharded_slots(optimizer)
    return found if found is not None and found.cuts_weights else None


def shard(optimizer: keras.optimizers.Optimizer, engine: Engine, options: AllReduce) -> None:
    """Makes an optimizer shard its slots, if the options of its scope say so; a second call has no effect."""
    if not options.in_parts:
        return
    is_done = "build" in vars(optimizer) if options.shard is None else sharded(optimizer) is not None
    # While it is made, an optimizer with a loss scale has no inner one yet.
    if not is_done and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        ShardedOptimizer(optimizer, engine, cuts_weights=options.shard is not None).install()
    save_whole_slots(optimizer)
