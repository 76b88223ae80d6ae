"""Gradients that a step takes from tapes of its own, and what it computes from them: of those of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf

from kdist._tf_internals import is_compiled_by_xla
from kdist.state.graphs.inlined import Inlined
from kdist.state.graphs.rank_dependence import tensor_key
from kdist.state.graphs.recomputed import Recomputed, RowReduction
from kdist.state.rows.reduction_frontier import ReductionFrontier, is_computed_of, is_weighted_sum
from kdist.step.losses.global_recomputation import RECOMPUTATION_ERRORS, GlobalRecomputation
from kdist.step.losses.global_value import GlobalValue
from kdist.strategies.open_step import OpenStep


class StepGradients:
    """Knows a rank's parts of gradients, and computes again what a step has computed from them otherwise than by a sum.

    A part is one whose mean by rows is the global gradient; or, where the step has weighted its loss, a term of it.

    Args:
        step: the open step.
    """

    def __init__(self, step: OpenStep) -> None:
        self._step = step
        self._known: dict[Any, RowReduction] = {}
        self._changed: set[str] = set()
        self._written = Recomputed(lambda tensor: tensor.name in self._changed)  # of what a step writes to variables

    def note(self, gradients: Sequence[Any]) -> None:
        """Says that a tape has returned gradients."""
        kind: Literal["mean", "sum"] = "sum" if self._step.loss_is_weighted else "mean"
        own = [each for each in gradients if isinstance(each, tf.Tensor) and tf.is_symbolic_tensor(each)]
        self._known |= {tensor_key(each): RowReduction(each, kind) for each in own}

    def are_means(self, value: tf.Tensor) -> bool:
        """Returns whether a tensor is a gradient, and the global one is the mean by rows."""
        return tensor_key(value) in self._known and self._known[tensor_key(value)].kind == "mean"

    def number(self, value: tf.Tensor, means: Mapping[Any, tf.Tensor]) -> GlobalValue | None:
        """Returns a number computed from the gradients of all ranks, and from means; `None` if it is of others.

        Collective: every rank must call this, in the same order.

        Args:
            value: tensor, the number.
            means: mapping by keys of tensors that count as means over the rank's rows.
        """
        if not self._are_made_of(value):
            return None
        inlined = self._inlined()
        try:
            frontier = self._frontier([value], means)
            of_all_ranks = GlobalRecomputation(self._step, frontier, inlined)
            return GlobalValue(value, of_all_ranks, inlined)
        except RECOMPUTATION_ERRORS:
            return None

    def of_all_ranks(self, value: tf.Tensor, means: Mapping[Any, tf.Tensor]) -> tf.Tensor | None:
        """Returns what the gradients of all ranks, and means, make of a tensor; `None` if it is computed of others.

        What values have in common is sent and computed once. Gradients do not pass through it.

        Collective: every rank must call this, in the same order.

        Args:
            value: tensor of the step.
            means: see `number`.
        """
        if not self._are_made_of(value):
            return None
        try:
            frontier = self._frontier([value], means)
            if any(each.tensor.name not in self._written.values for each in frontier.listed):
                of_all_ranks = GlobalRecomputation(self._step, frontier, self._inlined())
                self._written.values |= {each.tensor.name: of_all_ranks(each.tensor) for each in frontier.listed}
            self._changed |= frontier.changed
            return tf.stop_gradient(self._written(value))
        except RECOMPUTATION_ERRORS:
            return None

    def are_of_share(self, value: tf.Tensor) -> bool:
        """Returns whether a number is computed from gradients in which the rank's share of the rows is a factor.

        So it is in those of Keras' losses: they are no gradients of the rank's rows alone.
        """
        return self._are_made_of(value) and self._is_of_share(value)

    def is_known(self, value: tf.Tensor) -> bool:
        """Returns whether a tensor is a gradient, is computed from one, or has the rank's share of the rows in it.

        A share is in the gradients of Keras' losses, and in those that a function of the step's computes with a tape.
        """
        return self._are_made_of(value) or self._is_of_share(value)

    def _is_of_share(self, value: tf.Tensor) -> bool:
        return is_computed_of(value, {tensor_key(each) for each in (self._step.weight, self._step.share)})

    def applied(self, gradients: Sequence[Any], means: Mapping[Any, tf.Tensor]) -> list[Any] | None:
        """Returns gradients of which those that are computed from others are computed from those of all ranks.

        Collective: every rank must call this, in the same order.

        Args:
            gradients: sequence of what is applied: tensors, `IndexedSlices`, `None`.
            means: mapping by keys of tensors that count as means over the rank's rows.

        Returns:
            A list; `None` if some cannot be.
        """
        values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
        made = {place: each for place, each in enumerate(values) if self._makes(each)}
        if any(isinstance(gradients[place], tf.IndexedSlices) for place in made):  # each rank has other rows
            return None
        if made:
            try:
                frontier = self._frontier(list(made.values()), means)
                of_all_ranks = GlobalRecomputation(self._step, frontier, self._inlined())
                made = {place: of_all_ranks(each) for place, each in made.items()}
            except RECOMPUTATION_ERRORS:
                return None
        if self._step.loss_is_weighted:  # what is applied is summed over the ranks
            made = {place: self._step.weighted(each) for place, each in made.items()}
        return [made.get(place, each) for place, each in enumerate(gradients)]

    def _makes(self, value: Any) -> bool:
        """Returns whether a tensor is computed from gradients otherwise than by a sum that the ranks may add up."""
        return self._are_made_of(value) and not is_weighted_sum(
            value,
            lambda each: tensor_key(each) in self._known,
            self._step.depends_on_rows,
            may_add_others=not self._step.loss_is_weighted,
        )

    def _are_made_of(self, value: Any) -> bool:
        """Returns whether a tensor of the step is a gradient, or is computed from gradients."""
        graph = tf.compat.v1.get_default_graph()
        is_alone = self._step.engine.size == 1  # as with local SGD
        if is_alone or not (self._known and isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value)):
            return False
        is_in_step = value.graph is graph and not is_compiled_by_xla() and self._step.depends_on_rows(value)
        return is_in_step and is_computed_of(value, self._known)

    def _frontier(self, values: Sequence[tf.Tensor], means: Mapping[Any, tf.Tensor]) -> ReductionFrontier:
        known = {key: RowReduction(each, "mean") for key, each in means.items()}
        return ReductionFrontier(values, known | self._known, self._step.depends_on_rows)

    def _inlined(self) -> Inlined:
        return Inlined(self._step.depends_on_rows, ())
