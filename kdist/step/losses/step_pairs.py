"""What a step passes to losses and metrics of `compile` that relates rows, as a matrix of pairs does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.losses import get_keras_mask, set_keras_mask
from kdist.reports.log import once
from kdist.state.graphs.inlined import Inlined
from kdist.state.graphs.rank_dependence import tensor_key
from kdist.state.rows.row_frontier import RowFrontier
from kdist.state.rows.row_wise import can_relate_rows
from kdist.step.losses.global_recomputation import RECOMPUTATION_ERRORS, GlobalRecomputation
from kdist.step.losses.step_rows import StepRows
from kdist.strategies.open_step import OpenStep

_NOT_OF_ALL = (
    "{} is given what relates rows of this rank, and kdist cannot compute it for the rows of all ranks. It counts what "
    "each rank relates, and results differ from those of one process. Fix: compute what it is given from rows of "
    "`kdist.all_gather`"
)

Gather = Callable[[str, list[tf.Tensor]], list[tf.Tensor]]


class StepPairs:
    """Computes what relates rows again, from the rows of all ranks.

    Args:
        step: the open step.
        rows: `StepRows` of the step.
        gather: callable that takes what a value is, for messages, and rows of this rank that it is computed from, and
            returns those of all ranks.
    """

    def __init__(self, step: OpenStep, rows: StepRows, gather: Gather) -> None:
        self._step = step
        self._rows = rows
        self._gather = gather
        self._are_related: dict[Any, bool] = {}  # by the keys of tensors

    def relates_rows(self, values: Any) -> bool:
        """Returns whether a structure of values, used together, is found to relate rows.

        Nothing is found out where a step is traced for a number of rows.
        """
        leaves = [each for each in keras.tree.flatten(values) if self._rows.is_of_rows(each) and can_relate_rows(each)]
        key = tuple(map(tensor_key, leaves))
        if key not in self._are_related:
            row_wise = self._rows.row_wise(leaves[0]) if leaves and self._rows.of(leaves[0]) else None
            self._are_related[key] = row_wise is not None and row_wise.relates(leaves, *self._without_rows())
        return self._are_related[key]

    def of_all_ranks(self, values: Any, who: str) -> Any | None:
        """Returns a structure of values that relate rows, as the rows of all ranks make it; `None` where it is kept.

        Collective: every rank must call this, in the same order.

        Args:
            values: structure of tensors and others.
            who: str, what is given them, for messages.
        """
        if not self.relates_rows(values):
            return None
        made = self.of_rows(values, who)
        if made is None and self._step.engine.rank == 0:
            once.warning(_NOT_OF_ALL.format(who))
        return made

    def of_rows(self, values: Any, who: str) -> Any | None:
        """See `of_all_ranks`; whether the values relate rows or not, and without a warning.

        Collective: every rank must call this, in the same order.
        """
        leaves = keras.tree.flatten(values)
        masks = [get_keras_mask(each) for each in leaves]
        own = {id(each): each for each in (*leaves, *masks) if self._rows.is_of_rows(each)}
        row_wise = self._rows.row_wise(next(iter(own.values())))
        known, means = self._without_rows()
        inlined = Inlined(self._step.depends_on_rows, [*means, *known])
        with self._rows.computing_again():
            try:
                if row_wise is None:
                    raise LookupError(who)
                copies = {key: inlined(each) for key, each in own.items()}
                frontier = RowFrontier(list(copies.values()), row_wise, known, means)
                of_all = GlobalRecomputation(self._step, frontier, inlined, lambda rows: self._gather(who, rows))
                made = {key: of_all(each) for key, each in copies.items()}
            except RECOMPUTATION_ERRORS:
                return None
        for leaf, mask in zip(leaves, masks, strict=True):
            if id(leaf) in made and mask is not None:
                set_keras_mask(made[id(leaf)], made.get(id(mask), mask))
        return keras.tree.pack_sequence_as(values, [made.get(id(each), each) for each in leaves])

    def _without_rows(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        return self._rows.known(), list(self._rows.means.values())
