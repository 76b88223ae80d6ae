"""The stage that sums gradients, and of a table in parts gives each rank those of its rows, which it updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kdist.keras_hooks.layers.embedding import table_of
from kdist.keras_hooks.optimizers import TRAINED, innermost, trained_variables
from kdist.keras_hooks.patching import patched
from kdist.sharding.norms import whole_norms
from kdist.sharding.part import parts_are_updated
from kdist.sharding.table import part_variables_of
from kdist.step.reduce import Reduce
from kdist.step.update import Update, updated_variables


class TableReduce(Reduce):
    """Sums gradients over the ranks; the later stages and Keras update this rank's rows of each table."""

    def _reduce_and(self, update: Update, proceed: Callable[[], Any]) -> Any:
        if not self._has_parts(update):
            return super()._reduce_and(update, proceed)
        if not update.optimizer.built:
            variables = self._variables_of_all_ranks(update.variables)
            with tf.init_scope():
                update.optimizer.build(variables)
        return super()._reduce_and(update, lambda: self._update(update, proceed))

    def _has_parts(self, update: Update) -> bool:
        # Moving averages are of all weights of the optimizer.
        return any(table_of(each) for each in [*update.variables, *trained_variables(innermost(update.optimizer))])

    def _send(self, update: Update, places: Sequence[int], exact: list[tf.Tensor]) -> tuple[list[Any], list[Any]]:
        tables = {place: table_of(update.variables[place]) for place in places}
        whole = [place for place in places if tables[place] is None]
        sums, others = self._send_whole(update, whole, exact)
        by_place = dict(zip(whole, sums, strict=True))
        of_tables = [place for place in places if tables[place] is not None]
        terms = update.terms([update.gradients[place] for place in of_tables])
        for place, term in zip(of_tables, terms, strict=True):
            by_place[place] = tables[place].sum_of_gradients(term, self._step.engine)
        return [by_place[place] for place in places], others

    def _send_whole(self, update: Update, places: Sequence[int], exact: list[tf.Tensor]) -> tuple[list[Any], list[Any]]:
        """Returns what `_send` does, of weights that are whole on each rank.

        Collective: every rank must call this, in the same order.
        """
        return super()._send(update, places, exact)

    def _update(self, update: Update, proceed: Callable[[], Any]) -> Any:
        """Runs the later stages, and Keras' update, with what this rank updates in place of the weights."""
        weights, inner = update.variables, innermost(update.optimizer)
        are_parts = [table_of(weight) is not None for weight in updated_variables(weights, update.gradients)]
        update.variables = part_variables_of(weights)
        with (
            parts_are_updated(),
            whole_norms(update.optimizer, are_parts, self._step.engine),
            patched(inner, TRAINED, part_variables_of(trained_variables(inner))),
        ):
            result = proceed()
        update.variables = weights
        return result
