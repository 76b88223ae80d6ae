"""What a number that a step computes by hand is of its rank's rows: a mean, a sum, or computed from these."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdist.reports.log import once
from kdist.state.graphs.inlined import Inlined
from kdist.state.graphs.linear_terms import linear_terms
from kdist.state.graphs.rank_dependence import tensor_key
from kdist.state.rows.aggregates import Aggregates
from kdist.state.rows.frontier import Frontier
from kdist.state.rows.means import is_mean
from kdist.state.rows.means_and_sums import Kind, MeansAndSums
from kdist.state.rows.reduction_frontier import is_computed_of, is_weighted_sum
from kdist.state.rows.row_frontier import RowFrontier
from kdist.state.rows.row_wise import RowWise
from kdist.step.losses.global_recomputation import RECOMPUTATION_ERRORS, GlobalRecomputation
from kdist.step.losses.global_value import GlobalValue
from kdist.step.losses.scaled_sums import ScaledSums
from kdist.step.losses.step_gradients import StepGradients
from kdist.step.losses.step_pairs import Gather
from kdist.step.losses.step_rows import Means, StepRows
from kdist.strategies.open_step import OpenStep

_NO_MEAN = (
    "{} is computed from this rank's rows, and is no mean, no sum, and not computed from means and sums over them as "
    "far as kdist can find out: it relates rows. It counts as a mean, and results differ from those of one process. "
    "Fix: compute it from rows of `kdist.all_gather`, or from means and sums of `kdist.all_reduce`"
)
_UNKNOWN = (
    "{} is computed from this rank's rows, and kdist cannot find out whether it is a mean or a sum over them. It "
    "counts as a mean; if it is none, results differ from those of one process. Fix, then: compute it from means and "
    "sums of `kdist.all_reduce`"
)
_FIXED_NUMBER = (
    "{} is a sum over this rank's rows, and counts as a mean over them, as the step can only be traced for a fixed "
    "number of rows. Results differ from those of one process. Fix: read the number of rows by "
    "`keras.ops.shape(x)[0]`, or compute a mean"
)

_Terms = list[tuple[tf.Tensor, Any]]  # with their factors

KEPT = "What the step keeps of its rows"
_MAX_TERMS = 16  # of a number, as finding out about each takes time


class StepNumbers:
    """Finds what numbers of a step are of its rank's rows, each once, and warns of those of which nothing is found.

    Args:
        step: the open step.
        rows: `StepRows` of the step.
        gradients: `StepGradients` of the step.

    Attributes:
        gather: callable that takes what a number is, for messages, and rows of this rank that it is computed from, and
            returns those of all ranks.
        unrecorded: dict of tensors that no tape has recorded, by their keys.
        means: dict of what is found to be a mean over the rank's rows, by their keys.
    """

    def __init__(self, step: OpenStep, rows: StepRows, gradients: StepGradients) -> None:
        self._step = step
        self._rows = rows
        self._gradients = gradients
        self._found: dict[Any, ScaledSums | GlobalValue | None] = {}
        self._told: list[Any] = []
        self.gather: Gather = lambda _, rows: rows
        self.unrecorded: dict[Any, tf.Tensor] = {}
        self.means: Means = {}

    def is_mean(self, value: tf.Tensor) -> bool:
        """Returns whether a tensor, which has been looked for, is found to be a mean over rows."""
        return tensor_key(value) in self.means

    def parts(self, value: Any) -> list[tuple[tf.Tensor, float, bool | None]]:
        """Returns the numbers of rows of which a number is a sum, their weights, and whether they count as means.

        What a step computes from its own rows alone does not. `None` is for what is computed from means otherwise than
        by a factor that is equal on all ranks.
        """
        means = self._rows.means
        if self._step.engine.size == 1 or not (isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value)):
            return []
        parts: list[tuple[tf.Tensor, float, bool | None]] = []
        for term, factor in linear_terms(value, lambda term: tensor_key(term) in means):
            if tensor_key(term) in means:
                parts.append((term, factor, True))
            elif self._step.depends_on_rows(term):
                is_of_means = term.shape.rank == 0 and is_computed_of(term, means)
                is_sum = is_weighted_sum(term, lambda each: tensor_key(each) in means, self._step.depends_on_rows)
                parts.append((term, factor, (True if is_sum else None) if is_of_means else False))
        return parts

    def find(self, value: Any, who: str, means: Means | None = None) -> ScaledSums | GlobalValue | None:
        """Returns what a number is of the rank's rows; `None` for a mean, or if nothing is known of it.

        Collective: every rank must call this, in the same order.

        Args:
            value: tensor or number.
            who: str, what it is, for warnings; empty for none.
            means: dict of other tensors that count as means, by their keys.
        """
        if not (tf.is_symbolic_tensor(value) and isinstance(value, tf.Tensor)):
            return None
        key = tensor_key(value), bool(means), tf.compat.v1.get_default_graph()
        if key not in self._found:
            self._found[key] = self._found_of(value, who, {**self._rows.means, **(means or {})})
        return self._found[key]

    def _found_of(self, value: tf.Tensor, who: str, means: Means) -> ScaledSums | GlobalValue | None:
        if self._step.engine.size == 1 or not self._step.depends_on_rows(value):  # one, as with local SGD
            return None
        terms = linear_terms(value, lambda term: tensor_key(term) in means)
        terms = [each for each in terms if self._step.depends_on_rows(each[0])]
        if all(tensor_key(term) in means for term, _ in terms):
            return None
        with self._rows.computing_again():
            of_gradients = self._gradients.number(value, means)
        if of_gradients is not None:
            return of_gradients
        if self._gradients.are_of_share(value):
            self._warn_of_relation(value, who)
            return None
        found = self._rows.of(value)
        return None if found is None else self._of_rows(value, terms, found, who, means)

    def _of_rows(
        self, value: tf.Tensor, terms: _Terms, found: MeansAndSums, who: str, means: Means
    ) -> ScaledSums | GlobalValue | None:
        """Returns what a number is of the rank's rows, from those on which it depends; see `find`."""
        rows, of_data = self._rows.row_wise(value), value
        ends = [*means.values(), *self._rows.known(), *self._told, *self.unrecorded.values()]
        inlined = Inlined(self._step.depends_on_rows, ends)
        if rows is not None:
            of_data = inlined(value)
            found = rows.data_of(of_data, self._rows.known(), list(means.values()))

        def without_calls(term: tf.Tensor) -> tf.Tensor:
            return term if of_data is value else inlined(term)

        terms, kinds = self._kinds(value, terms, found, without_calls, means)
        known = [*means.values(), *self._rows.known(), *self._told]
        relates_rows = "other" in kinds or any(
            kind != "sum" and found.relates_rows(without_calls(term), known)
            for (term, _), kind in zip(terms, kinds, strict=True)
            if tensor_key(term) not in means and found.length is None
        )
        if set(kinds) == {"mean"} and not relates_rows:
            self.means[tensor_key(value)] = value
        if rows is not None and (relates_rows or None in kinds):
            whole = value if value.shape.is_fully_defined() else tf.reduce_sum(value)  # as it is differentiated
            of_all_ranks = self._of_all_ranks(found, rows, whole, inlined, who, means)
            if of_all_ranks is not None:
                return of_all_ranks
        if relates_rows and who:
            self._warn_of_relation(value, who)
        elif None in kinds and rows is not None and not is_mean(of_data, found, known, list(means.values())):
            self.warn(_UNKNOWN, who)
        sums = [each for each, kind in zip(terms, kinds, strict=True) if kind == "sum"]
        if sums and found.length is not None:  # of another number of rows nothing might be known
            self.warn(_FIXED_NUMBER, who)
            return None
        return ScaledSums(self._step.weight, sums) if sums else None

    def _kinds(
        self,
        value: tf.Tensor,
        terms: _Terms,
        found: MeansAndSums,
        without_calls: Callable[[tf.Tensor], tf.Tensor],
        means: Means,
    ) -> tuple[_Terms, list[Kind | None]]:
        """Returns the terms of which a number is a sum, and what each is; the number alone if that says more."""
        whole: _Terms = [(value, 1.0)]
        is_whole = found.length is not None or [term.name for term, _ in terms] == [value.name]  # factors may hold it
        if is_whole or len(terms) > _MAX_TERMS:
            terms = whole
        kinds = [self._kind(found, without_calls(term), means) for term, _ in terms]
        if set(kinds) <= {"mean", "sum"} or len(terms) == 1:
            return terms, kinds
        return whole, [self._kind(found, without_calls(value), means)]  # a small term says little about the whole

    def _of_all_ranks(
        self, found: MeansAndSums, rows: RowWise, value: tf.Tensor, inlined: Inlined, who: str, means: Means
    ) -> GlobalValue | None:
        """Returns a number computed from means and sums over the rows of all ranks, or else from these rows, or `None`.

        Collective: every rank must call this, in the same order.
        """
        graph = tf.compat.v1.get_default_graph()
        if self._rows.is_computed_again(value, means):
            return None  # as of a gradient
        with self._rows.computing_again():
            try:
                own = inlined(value)
                frontier = self._frontier_of(found, rows, own, means)
                if any(frontier.is_changed(each) for each in self.unrecorded.values() if each.graph is graph):
                    return None  # a copy would have the gradients that no tape takes
                of_all_ranks = GlobalRecomputation(
                    self._step, frontier, inlined, lambda rows: self.gather(who or KEPT, rows)
                )
                return GlobalValue(own, of_all_ranks, inlined)
            except RECOMPUTATION_ERRORS:
                return None

    def _frontier_of(self, found: MeansAndSums, rows: RowWise, value: tf.Tensor, means: Means) -> Frontier:
        """Returns from what a number is to be computed again.

        Raises:
            LookupError: if it cannot be.
        """
        fixed, numbers = self._rows.known(), list(means.values())
        with contextlib.suppress(LookupError):
            return Aggregates(value, found, fixed, numbers)
        if not value.shape.is_fully_defined():
            raise LookupError(value.name)
        frontier = RowFrontier([value], rows, fixed, numbers)
        if not found.can_run(value, [*fixed, *numbers]):
            raise LookupError(value.name)  # as where it has the number of a rank's rows written into it
        return frontier

    def _kind(self, found: MeansAndSums, value: tf.Tensor, means: Means) -> Kind | None:
        if tensor_key(value) in means:
            return "mean"
        fixed = [*means.values(), *self._rows.known()]
        kind = found.kind(value, fixed)
        # What is computed from one that was told of is no news; and a sum that is divided by its rows is a mean.
        return kind if kind in ("mean", "sum") or not self._told else found.kind(value, [*fixed, *self._told])

    def kind_of(self, value: tf.Tensor) -> Kind | None:
        """Returns what a number of the step is of the rank's rows, as far as that is found out."""
        found = self._rows.of(value) if tf.is_symbolic_tensor(value) and self._step.depends_on_rows(value) else None
        return None if found is None else self._kind(found, value, self._rows.means)

    def _warn_of_relation(self, value: tf.Tensor, who: str) -> None:
        """Logs that a number relates rows, and remembers it: what is computed from it is no news."""
        if who:
            self._told.append(value)
            self.warn(_NO_MEAN, who)

    def warn(self, text: str, who: str) -> None:
        """Logs a warning once, on rank 0."""
        if self._step.engine.rank == 0 and who:
            once.warning(text.format(who))
