"""What a step writes beside weights, and how one process's value is made of those of the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._tf_internals import SCATTERS
from kdist.engines.engine import Engine
from kdist.keras_hooks.optimizers import innermost, optimizers_of, trained_variables
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.variables import (
    aggregation_of,
    is_of_one_rank,
    is_seed,
    key_of,
    raw_variable,
    recorded_assignments,
    statistics_of_keras,
)
from kdist.state.graphs.increments import Increments
from kdist.state.graphs.rank_dependence import RankDependence
from kdist.state.graphs.scattered import scattered
from kdist.state.rows.reduction_frontier import is_weighted_sum
from kdist.state.written import FIX, Merge, Written, WrittenState

_KEPT = {
    "sum": "The ranks' increments are summed",
    "count": "The ranks' increments are summed, unless all of them are 1",
    "mean": "The mean of the ranks' values, weighted by their rows, is kept",
    "first": "Rank 0's value is kept",
}
_COLLECTIVES = ("allreduce", "allgather", "broadcast")  # their results are equal on all ranks
_TABLE_WRITES = ("LookupTableInsertV2", "LookupTableImportV2", "LookupTableRemoveV2")


class Assignments:
    """Records which variables a step writes while it is traced or run, and says how each is merged.

    Optimizers' variables and metrics are left alone, and so are variables that are set to values in which the ranks
    cannot differ: a counter of steps, the weights of a teacher that follow the student's. What is written to weights is
    computed for the rows of all ranks; where that is not found out, a warning says so. Another variable's
    `aggregation` says how it is merged. Without one, increments of integers are summed, statistics of Keras' own layers
    are averaged, and others are computed for the rows of all ranks as they are assigned. Where that is not found out,
    they are averaged with a warning.

    Args:
        model: `keras.Model`.
        engine: `Engine`, how the ranks of the step communicate.
        data: sequence of tensors of the step that differ between ranks.
        state: `WrittenState` of the model, which is added to.
        kind: str, the kind of step. What an earlier eager step of this kind has written counts as written in this one:
            a function of the user's that was traced then is not traced again.
        is_traced_alike: bool, whether all ranks trace the same graph. If not, the number of rows is a constant on some
            ranks only: what is sent must not depend on a rank's graph.
        is_gradient: callable that takes a tensor and returns whether it is a rank's part of a gradient, of which the
            mean by rows is that of the global batch.
        of_all_ranks: callable that takes a tensor, and as `is_weight` whether it is written to a weight, and returns
            what the rows of all ranks make of it, or `None` if it does not find that out.
        is_traced_again: callable that returns whether the step is to be traced again; no warnings are given before.

    Attributes:
        graph: `tf.Graph`, that of the step.
        is_eager: bool, whether the step runs eagerly.
        any_new: bool, whether something was written since this was last set to `False`.
    """

    def __init__(
        self,
        model: keras.Model,
        engine: Engine,
        data: Sequence[tf.Tensor],
        state: WrittenState,
        kind: str,
        *,
        is_traced_alike: bool,
        is_gradient: Callable[[tf.Tensor], bool] = lambda _: False,
        of_all_ranks: Callable[..., tf.Tensor | None] = lambda *_, **__: None,
        is_traced_again: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model = model
        self._is_gradient = is_gradient
        self._of_all_ranks = of_all_ranks
        self._is_traced_again = is_traced_again
        self._engine = engine
        self._data = data
        self._state = state
        self._known = state.merges[kind]
        self._is_traced_alike = is_traced_alike
        self._num_rows = {each.shape[0] for each in data if each.shape.rank} - {None}  # a constant of the graph
        self._written: dict[int, Written] = {}
        self._written_weights: list[tuple[Any, tuple[str, list[Any], tf.Graph, int]]] = []
        self._statistics: set[int] = set()
        self._is_suspended = False
        self.any_new = False

    def __enter__(self) -> Assignments:
        self.is_eager = tf.executing_eagerly()
        self.graph = tf.compat.v1.get_default_graph()
        weights = [raw_variable(each) for each in self._model.trainable_variables]
        self._dependence = RankDependence(self.graph, self._data, weights)
        self._increments = Increments(self._dependence.source)
        self._ignored = self._variables_of_others()
        self._weights = {key_of(each) for each in self._model.trainable_variables}
        for key, (variable, merge) in self._known.items() if self.is_eager else ():
            self._written[key] = Written(variable, self._value(variable), merge=merge)
        with contextlib.ExitStack() as stack:
            stack.enter_context(recorded_assignments(self._record))
            for name in _COLLECTIVES if self._engine.size > 1 else ():
                stack.enter_context(patched(self._engine, name, self._noting_results(getattr(self._engine, name))))
            self._patches = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._patches.close()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which nothing is recorded, for the updates of weights."""
        outer, self._is_suspended = self._is_suspended, True
        try:
            yield
        finally:
            self._is_suspended = outer

    def may_differ(self, value: tf.Tensor) -> bool:
        """Returns whether the step's graph shows that a tensor depends on a rank's rows, or that a scalar counts them.

        Ranks that trace the step with other numbers of rows find the same, but of a scalar.
        """
        if not tf.is_symbolic_tensor(value):
            return False
        return self.depends_on_rows(value) or (value.shape.rank == 0 and self._is_number_of_rows([value]))

    def depends_on_rows(self, value: tf.Tensor) -> bool:
        """Returns whether a tensor is computed from a rank's rows, as far as a graph shows it; eagerly `True`."""
        if not tf.is_symbolic_tensor(value):
            return tf.executing_eagerly()  # a constant that a graph has captured does not
        return self._dependence.differs([value], value.graph)

    def _noting_results(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_note(*args: Any, **kwargs: Any) -> Any:
            with self.suspended():  # engines write variables of their own
                results = collective(*args, **kwargs)
            self._dependence.add_equal(tf.nest.flatten(results, expand_composites=True))
            return results

        return call_and_note

    def _record(self, variable: Any, method: str, values: list[Any]) -> tf.Tensor | None:
        """Records an assignment; returns what the rows of all ranks make of its value, if that is found out."""
        key = key_of(variable)
        if self._is_suspended or is_seed(variable):
            return None
        if key in self._ignored:
            if key in self._weights and not tf.executing_eagerly():
                graph = tf.compat.v1.get_default_graph()
                self._dependence.add_graph(graph)
                value = self._global_value(variable, method, values, is_weight=True)
                if value is None:
                    self._written_weights.append((variable, (method, values, graph, len(graph.get_operations()))))
                return value
            return None
        self.any_new = True
        if key not in self._written:
            self._written[key] = Written(variable, self._value(variable))
        if tf.executing_eagerly():
            return None
        graph = tf.compat.v1.get_default_graph()
        self._dependence.add_graph(graph)
        value = self._global_value(variable, method, values)
        if value is not None:
            method, values = "assign" if method in SCATTERS else method, [value]
        self._written[key].assignments.append((method, values, graph, len(graph.get_operations())))
        return value

    def _global_value(
        self, variable: Any, method: str, values: list[Any], *, is_weight: bool = False
    ) -> tf.Tensor | None:
        """Returns what the rows of all ranks make of a value, if nothing else says how the ranks' values are merged."""
        raw = raw_variable(variable)
        is_known = raw.dtype != tf.string and raw.shape.is_fully_defined() and self._is_traced_alike
        if not is_known or aggregation_of(variable) != "none":
            return None
        terms = self._increments.terms(raw, method, values)
        if terms is not None and raw.dtype.is_integer:  # it counts
            return None
        is_of_rows = any(map(self.depends_on_rows, filter(tf.is_symbolic_tensor, values)))
        if not (is_of_rows or self._is_number_of_rows(terms or [])):
            return None
        if key_of(variable) in statistics_of_keras(self._model) or is_of_one_rank(self._model, variable):
            return None
        if not is_weight and is_of_rows and terms and all(map(self._is_of_gradients, terms)):
            return None
        if method in SCATTERS:
            with self.suspended():
                whole = scattered(raw, method, values)
            values = [] if whole is None else [whole]
        if len(values) != 1 or not tf.is_symbolic_tensor(values[0]):
            return None
        with self.suspended():
            is_known = values[0].shape.is_fully_defined()
            value = values[0] if is_known else tf.ensure_shape(values[0], raw.shape)
            value = self._of_all_ranks(value, is_weight=is_weight)
        if value is not None:
            value = tf.identity(value)
            self._dependence.add_equal([value])
        return value

    def _value(self, variable: Any) -> tf.Tensor:
        """Returns a variable's value now, as a tensor of the step, not of a branch."""
        with tf.init_scope() if self.is_eager else self.graph.as_default():
            return tf.identity(raw_variable(variable))

    def _variables_of_others(self) -> set[int]:
        """Returns the keys of variables that are synchronised elsewhere; the first step may make more of them."""
        model = self._model
        others = [*model.trainable_variables, *model.metrics_variables]
        for optimizer in optimizers_of(model):
            others += [*optimizer.variables, *trained_variables(innermost(optimizer))]
        return {key_of(each) for each in others}

    def to_merge(self) -> list[tuple[Written, Merge]]:
        """Returns the variables written so far in which the ranks may differ, and how they are merged."""
        ignored = self._variables_of_others()
        self._statistics = statistics_of_keras(self._model)
        found = []
        for key in self._in_one_order():
            written = self._written[key]
            if key in ignored or is_of_one_rank(self._model, written.variable):
                continue
            self._state.variables[key] = written.variable
            merge = written.merge or self._merge_of(written)
            if merge is not None:
                self._known[key] = written.variable, merge
                found.append((written, merge))
        return found

    @property
    def _may_differ_in_code(self) -> bool:
        """Whether a branch in Python, which may depend on a rank's rows, decides what is written."""
        return self.is_eager and self._engine.size > 1

    def _writable(self) -> dict[int, Any]:
        """Returns the variables of the model that steps may write beside weights, by their keys, in one order."""
        ignored = self._variables_of_others()
        found = {key_of(each): each for each in self._model.non_trainable_variables if not is_seed(each)}
        return {key: each for key, each in found.items() if key not in ignored}

    def _in_one_order(self) -> list[int]:
        """Returns the keys of what is written; where ranks may write in any order, the model's variables in its own."""
        own = [key for key in self._writable() if key in self._written] if self._may_differ_in_code else []
        return [*own, *(key for key in self._written if key not in own)]

    def add_writes_of_other_ranks(self) -> None:
        """Adds variables of the model that other ranks alone have written in an eager step.

        Collective in an eager step: every rank must call this, in the same order.
        """
        if not self._may_differ_in_code:
            return
        unknown = {key: each for key, each in self._writable().items() if key not in self._known}
        if not unknown:
            return
        for (key, variable), is_written in zip(unknown.items(), self._on_any_rank(unknown), strict=True):
            if is_written and key not in self._written:
                self._written[key] = Written(variable, self._value(variable))

    def _on_any_rank(self, keys: Iterable[int]) -> list[bool]:
        with self.suspended():
            (counts,) = self._engine.allreduce([tf.constant([key in self._written for key in keys], tf.int32)])
        return [bool(count) for count in counts.numpy()]

    def is_any_new(self) -> bool:
        """Returns whether something was written since the last merge, in an eager step on any rank.

        Collective in an eager step: every rank must call this, in the same order.
        """
        if not (self._may_differ_in_code and self._writable()):
            return self.any_new
        with self.suspended():
            (count,) = self._engine.allreduce([tf.constant([self.any_new], tf.int32)])
        return bool(count[0])

    def _merge_of(self, written: Written) -> Merge | None:
        """Returns how a variable is merged, `None` if all ranks have written the same."""
        declared, dtype = aggregation_of(written.variable), raw_variable(written.variable).dtype
        is_number = dtype.is_floating or dtype.is_complex
        by_aggregation: dict[str, Merge] = {"sum": "sum", "mean": "mean", "only_first_replica": "first"}
        if declared in by_aggregation:
            return by_aggregation[declared]
        if key_of(written.variable) in self._statistics:
            return "mean"
        if dtype == tf.string:
            return None  # the ranks are compared between steps
        differs = any(self._may_differ(*each) for each in written.assignments)
        by_graph = not self.is_eager and self._is_traced_alike
        terms = None if self.is_eager else self._terms(written)
        if dtype.is_integer and (self.is_eager or terms is not None):
            if (self._num_rows or not by_graph) and written.before.shape.rank is not None:
                written.counts_rows = differs or self._is_number_of_rows(terms or [])
                return "count"
            return "sum" if differs or not by_graph else None
        if by_graph and not differs:
            return None
        guessed: Merge = "mean" if is_number else "first"
        if differs and not (is_number and not self.is_eager and self._adds_gradients(written)):
            self.warn(written, guessed)
        return guessed

    def _adds_gradients(self, written: Written) -> bool:
        """Returns whether a variable gets nothing of a rank's rows but gradients that are added, as accumulators do."""
        differing = [each for each in written.assignments if self._may_differ(*each)]
        by_assignment = [self._increments.terms(raw_variable(written.variable), *each[:2]) for each in differing]
        return all(terms and all(map(self._is_of_gradients, terms)) for terms in by_assignment)

    def _is_of_gradients(self, term: Any) -> bool:
        return is_weighted_sum(term, self._is_gradient, self.depends_on_rows, self._dependence.source)

    def _may_differ(self, method: str, values: list[Any], graph: tf.Graph, place: int) -> bool:
        return self._dependence.differs([each for each in values if tf.is_tensor(each)], graph)

    def _terms(self, written: Written) -> list[Any] | None:
        """Returns all that is added to a variable, `None` if it is replaced."""
        variable = raw_variable(written.variable)
        by_assignment = [self._increments.terms(variable, *each[:2]) for each in written.assignments]
        return None if None in by_assignment else [term for terms in by_assignment for term in terms or ()]

    def _is_number_of_rows(self, terms: list[Any]) -> bool:
        """Returns whether some of the terms are computed from a constant that may be the number of rows."""
        constants = [np.asarray(constant) for each in terms for constant in self._increments.constants(each)]
        numbers = [each for each in constants if each.dtype.kind in "iuf"]
        counts = [each[each != 0] for each in numbers if each.any()]
        return any((each % rows == 0).all() for each in counts for rows in self._num_rows - {1})

    def warn(self, written: Written, merge: Merge) -> None:
        """Warns once of a variable that is merged by a guess; not of one whose merge is known."""
        is_known = aggregation_of(written.variable) != "none" or key_of(written.variable) in self._statistics
        if not (is_known or self._is_traced_again()):
            self._state.warn_once(
                written.variable,
                "the step writes %r from each rank's own rows, and no `aggregation` says how they make the value of "
                f"one process. {_KEPT[merge]}. {FIX}",
            )

    def warn_of_differences(self) -> None:
        """Warns of what differs between ranks and is not merged, or too late. Must be called before the first merge."""
        if self._is_traced_again():
            return
        self._warn_of_tables()
        self._warn_of_weights()
        self._warn_of_early_reads()

    def _warn_of_tables(self) -> None:
        for operation in self.graph.get_operations() if not self.is_eager else ():
            if operation.type in _TABLE_WRITES and self._dependence.differs(operation.inputs[1:], self.graph):
                self._state.warn_of_tables_once()

    def _warn_of_weights(self) -> None:
        differing = (variable for variable, assignment in self._written_weights if self._may_differ(*assignment))
        if (variable := next(differing, None)) is not None:
            self._state.warn_once(
                variable,
                "the step writes the weight %r from this rank's own rows, and kdist cannot compute it from those of "
                "all ranks, as where Python computes it: results differ from those of one process. Fix: compute it "
                'from what `kdist.all_reduce(gradients, "mean")` returns',
            )

    def _warn_of_early_reads(self) -> None:
        """Warns of variables that the step has used since it wrote them."""
        for written, merge in self.to_merge():
            handle = raw_variable(written.variable).handle
            is_harmless = key_of(written.variable) in self._statistics or (merge == "count" and not written.counts_rows)
            if written.assignments and not is_harmless:
                _, _, graph, place = written.assignments[0]
                if self._dependence.is_used(handle, graph, place, lambda other: id(other) in self._written):
                    self._state.warn_once(
                        written.variable,
                        "the step uses %r after it has written it, when it has this rank's rows only: results differ "
                        "from those of one process. Fix: write the value of the global batch, by "
                        '`kdist.all_reduce(x, "mean")` in the layer',
                    )
