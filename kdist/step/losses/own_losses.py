"""Losses, metrics and logs that a step computes by hand from its rank's rows: means over rows, sums, and others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist._tf_internals import is_compiled_by_xla
from kdist.data.batch import Rows
from kdist.keras_hooks.losses import get_keras_mask, layer_that_added, scaled_added_losses, set_keras_mask
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.trainer import computes_own_loss
from kdist.reports.log import once
from kdist.state.graphs.inlined import Inlined
from kdist.state.graphs.linear_terms import linear_terms
from kdist.state.graphs.rank_dependence import computed_of, tensor_key
from kdist.state.rows.aggregates import Aggregates
from kdist.state.rows.means import is_mean
from kdist.state.rows.means_and_sums import Kind, MeansAndSums
from kdist.state.rows.row_cut import RowCut
from kdist.state.rows.row_wise import RowWise, can_relate_rows
from kdist.step.losses.global_value import GlobalValue
from kdist.step.losses.of_all_ranks import OfAllRanks
from kdist.step.losses.own_gradients import OwnGradients
from kdist.step.losses.own_step import OwnStep
from kdist.step.losses.scaled_sums import ScaledSums

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
_APPLIED = (
    "The step of {} applies gradients that it computes from this rank's, as by clipping, and kdist cannot compute them "
    "from those of all ranks: results differ from those of one process. Fix: compute them from what "
    '`kdist.all_reduce(gradients, "mean")` returns, or by `clipnorm=` of the optimizer'
)
_NOT_OF_ALL = (
    "{} is given what relates rows of this rank, and kdist cannot compute it for the rows of all ranks. It counts what "
    "each rank relates, and results differ from those of one process. Fix: compute what it is given from rows of "
    "`kdist.all_gather`"
)
_EAGER = (
    "{} computes losses by itself in eager steps (run_eagerly=True). They count as means over the rank's rows, as only "
    "a graph shows what they are. A sum is too small then. Fix: train without run_eagerly=True"
)

_MAX_TERMS = 16  # of a number, as finding out about each takes time

Means = dict[Any, tf.Tensor]
"""Tensors that count as means over the rank's rows, by graph and name."""

Gather = Callable[[str, list[tf.Tensor]], list[tf.Tensor]]


class OwnLosses:
    """Makes the mean over the ranks of what a step computes by hand that of the global batch.

    What counts as a mean over the rank's rows is weighted by the rank's share of the rows. A sum over rows is divided
    by the share first. What is computed from sums and means is computed from those of all ranks. A number that is none
    of these is warned of. In eager steps, and in graphs of which nothing is found out, all counts as a mean.

    Args:
        step: the open step.
    """

    def __init__(self, step: OwnStep) -> None:
        self._step = step
        self._model = self._loss = ""
        self._found: dict[Any, ScaledSums | GlobalValue | None] = {}
        self._differentiated: Means = {}
        self._means: Means = {}
        self._statistics: list[tf.Tensor] = []
        self._told: list[Any] = []
        self._of_data: MeansAndSums | None = None
        self._row_wise: RowWise | None = None
        self._computed_again: set[str] = set()  # names of operations
        self._unrecorded: dict[Any, tf.Tensor] = {}  # what no tape has recorded, by graph and name
        self._are_related: dict[Any, bool] = {}  # by the keys of tensors
        self._has_own_loss = False
        self._gradients = OwnGradients(step)
        self._gather: Gather = lambda _, rows: rows

    def is_gradient(self, value: tf.Tensor) -> bool:
        """Returns whether a tensor is a gradient that a tape has returned, whose mean by rows is the global one."""
        return self._gradients.are_means(value)

    def applied(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns gradients that a step applies; those that it has computed from others, as by clipping, of all ranks'.

        Collective: every rank must call this, in the same order.
        """
        with self._computing_again():
            found = self._gradients.applied(gradients, self._means)
        if found is None:
            self._tell(_APPLIED, self._model)
        return list(gradients) if found is None else found

    def note_mean(self, value: Any) -> None:
        """Says that a loss counts as a mean over the rank's rows, whatever it is computed by."""
        if tf.is_symbolic_tensor(value):
            self._means[tensor_key(value)] = value

    def note_statistics(self, moments: Sequence[tf.Tensor]) -> None:
        """Says by which statistics a layer normalizes; the log names those that are a rank's own."""
        self._statistics += [each for each in moments if tf.is_symbolic_tensor(each)]

    def as_differentiated_mean(self, value: Any) -> Any:
        """See `as_mean`; of the loss that the step is about to differentiate."""
        return self.as_mean(value, self._loss)

    def note_differentiated_mean(self, value: Any) -> None:
        """Says that the gradients of a number are those of a mean, whatever the number is."""
        self._differentiated[tensor_key(value)] = value

    def compiled(self, loss: Callable[..., tf.Tensor], of_rows: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        """Returns a function that computes a loss.

        Args:
            loss: callable, the compiled loss.
            of_rows: callable, the same for arguments whose rows are each computed from one of the data. Its results
                count as means, whatever they are computed by; those of `loss` as what a step computes by hand.
        """

        def call(*args: Any, **kwargs: Any) -> tf.Tensor:
            if self.relates_rows((args, kwargs)):
                return loss(*args, **kwargs)
            value = of_rows(*args, **kwargs)
            self.note_mean(value)
            return value

        return call

    def relates_rows(self, values: Any) -> bool:
        """Returns whether a structure of values, used together, is found to relate rows, as a matrix of pairs does.

        Of a model whose steps are Keras' own nothing is found out, nor where a step is traced for a number of rows.
        """
        leaves = [each for each in keras.tree.flatten(values) if self._is_of_rows(each) and can_relate_rows(each)]
        key = tuple(map(tensor_key, leaves))
        if key not in self._are_related:
            self._are_related[key] = bool(leaves) and self._finds_relation(leaves)
        return self._are_related[key]

    def _is_of_rows(self, value: Any) -> bool:
        graph = tf.compat.v1.get_default_graph()
        is_own = tf.is_symbolic_tensor(value) and isinstance(value, tf.Tensor) and value.graph is graph
        return self._has_own_loss and is_own and self._step.depends_on_rows(value)

    def _finds_relation(self, leaves: Sequence[tf.Tensor]) -> bool:
        found = self._rows_known_of(leaves[0])
        if found is None or found.length is not None or self._is_in_branch(found, leaves[0]):
            return False
        self._row_wise = self._row_wise or RowWise(found)
        return self._row_wise.relates(leaves, self._known(), list(self._means.values()))

    def of_all_ranks(self, values: Any, who: str) -> Any | None:
        """Returns a structure of values that relate rows, as the rows of all ranks make it; `None` where it is kept.

        Collective: every rank must call this, in the same order.

        Args:
            values: structure of tensors and others.
            who: str, what is given them, for messages.
        """
        if not self.relates_rows(values) or self._row_wise is None:
            return None
        leaves = keras.tree.flatten(values)
        masks = [get_keras_mask(each) for each in leaves]
        own = {id(each): each for each in (*leaves, *masks) if self._is_of_rows(each)}
        inlined = Inlined(self._step.depends_on_rows, [*self._means.values(), *self._known()])
        with self._computing_again():
            try:
                copies = {key: inlined(each) for key, each in own.items()}
                cut = RowCut(list(copies.values()), self._row_wise, self._known(), list(self._means.values()))
                of_all = OfAllRanks(self._step, cut, inlined, lambda rows: self._gather(who, rows))
                made = {key: of_all(each) for key, each in copies.items()}
            except (LookupError, TypeError, ValueError, tf.errors.OpError):
                self._tell(_NOT_OF_ALL, who)
                return None
        for leaf, mask in zip(leaves, masks, strict=True):
            if id(leaf) in made and mask is not None:
                set_keras_mask(made[id(leaf)], made.get(id(mask), mask))
        return keras.tree.pack_sequence_as(values, [made.get(id(each), each) for each in leaves])

    @contextlib.contextmanager
    def opened(self, model: keras.Model, gather: Gather) -> Iterator[None]:
        """A context in which a model's step computes its losses.

        Args:
            model: `keras.Model`.
            gather: callable that takes what a number is, for messages, and rows of this rank that it is computed from,
                and returns those of all ranks.
        """
        self._gather = gather
        self._has_own_loss = computes_own_loss(model) and self._step.engine.size > 1
        self._model = type(model).__name__
        self._loss = f"The loss that the step of {self._model} differentiates"
        if self._has_own_loss and tf.executing_eagerly():
            self._tell(_EAGER, type(model).__name__)
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                scaled_added_losses(model, lambda loss, total: self.as_mean(total, layer_that_added(model, loss)))
            )
            if computes_own_loss(model):
                stack.enter_context(self._scaled_gradients())
            yield

    @contextlib.contextmanager
    def _scaled_gradients(self) -> Iterator[None]:
        original = tf.GradientTape.gradient

        def gradient(
            tape: tf.GradientTape, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            are_weights = [isinstance(each, (tf.Variable, keras.Variable)) for each in tf.nest.flatten(sources)]
            if all(are_weights) and output_gradients is None:
                target, output_gradients = self._targets(tf.nest.flatten(target)) or (target, None)
                gradients = original(tape, target, sources, output_gradients, *args, **kwargs)
                self._gradients.note(tf.nest.flatten(gradients))
                return gradients
            return original(tape, target, sources, output_gradients, *args, **kwargs)

        unrecorded, stop = self._unrecorded, tf.GradientTape.stop_recording

        @contextlib.contextmanager
        def stop_recording(tape: tf.GradientTape) -> Iterator[None]:
            graph = tf.compat.v1.get_default_graph()
            start = len(graph.get_operations())
            try:
                with stop(tape):
                    yield
            finally:
                made = [output for each in graph.get_operations()[start:] for output in each.outputs]
                unrecorded.update({tensor_key(each): each for each in made})

        with (
            patched(tf.GradientTape, "gradient", gradient),
            patched(tf.GradientTape, "stop_recording", stop_recording),
        ):
            yield

    def _targets(self, targets: list[Any]) -> tuple[list[Any], list[tf.Tensor]] | None:
        """Returns what is differentiated in the place of targets, and by which gradients; `None` for as they are."""
        found = [self._find(each, self._loss, self._differentiated) for each in targets]
        if not any(found) or not all(isinstance(each, tf.Tensor) for each in targets):
            return None
        scaled = []
        for each, own in zip(targets, found, strict=True):
            scaled += (own or ScaledSums(self._step, ())).targets(each)
        return [each for each, _ in scaled], [by for _, by in scaled]

    def as_mean(self, value: Any, who: str) -> Any:
        """Returns a number of the step such that its weighted sum over the ranks is that of the global batch.

        Args:
            value: tensor or number.
            who: str, what it is, for messages.
        """
        found = self._find(value, who)
        if found:
            value = found.as_mean(value)
            self.note_mean(value)
        return value

    def _find(self, value: Any, who: str, means: Means | None = None) -> ScaledSums | GlobalValue | None:
        """Returns what a number is of the rank's rows; `None` for a mean, or if nothing is known of it."""
        if not (tf.is_symbolic_tensor(value) and isinstance(value, tf.Tensor)):
            return None
        key = tensor_key(value), bool(means), tf.compat.v1.get_default_graph()
        if key not in self._found:
            self._found[key] = self._found_of(value, who, {**self._means, **(means or {})})
        return self._found[key]

    def _found_of(self, value: tf.Tensor, who: str, means: Means) -> ScaledSums | GlobalValue | None:
        is_alone = self._step.engine.size == 1  # as with local SGD
        if is_alone or not self._step.depends_on_rows(value):
            return None
        terms = linear_terms(value, lambda term: tensor_key(term) in means)
        terms = [each for each in terms if self._step.depends_on_rows(each[0])]
        if all(tensor_key(term) in means for term, _ in terms):
            return None
        with self._computing_again():
            of_gradients = self._gradients.number(value, means)
        if of_gradients is not None:
            return of_gradients
        if self._gradients.are_of_share(value):
            self._told.append(value)
            self._tell(_NO_MEAN, who)
            return None
        found = self._rows_known_of(value)
        if found is None:
            return None
        rows, of_data = None, value
        ends = [*means.values(), *self._known(), *self._told, *self._unrecorded.values()]
        inlined = Inlined(self._step.depends_on_rows, ends)
        if found.length is None and not self._is_in_branch(found, value):
            rows = self._row_wise = self._row_wise or RowWise(found)
            of_data = inlined(value)
            found = rows.data_of(of_data, self._known(), list(means.values()))

        def without_calls(term: tf.Tensor) -> tf.Tensor:
            return term if of_data is value else inlined(term)

        is_whole = found.length is not None or [term.name for term, _ in terms] == [value.name]  # factors may hold it
        if is_whole or len(terms) > _MAX_TERMS:
            terms = [(value, 1.0)]
        kinds = [self._kind(found, without_calls(term), means) for term, _ in terms]
        if not set(kinds) <= {"mean", "sum"} and len(terms) > 1:  # a small one says little about the whole
            terms, kinds = [(value, 1.0)], [self._kind(found, without_calls(value), means)]
        known = [*means.values(), *self._known(), *self._told]
        relates_rows = "other" in kinds or any(
            kind != "sum" and found.relates_rows(without_calls(term), known)
            for (term, _), kind in zip(terms, kinds, strict=True)
            if tensor_key(term) not in means and found.length is None
        )
        if relates_rows or None in kinds:
            whole = value if value.shape.is_fully_defined() else tf.reduce_sum(value)  # as it is differentiated
            of_all_ranks = None if rows is None else self._of_all_ranks(found, rows, whole, inlined, who, means)
            if of_all_ranks is not None:
                return of_all_ranks
        if relates_rows:
            self._told.append(value)
            self._tell(_NO_MEAN, who)
        elif None in kinds and rows is not None and not is_mean(of_data, found, known, list(means.values())):
            self._tell(_UNKNOWN, who)
        sums = [each for each, kind in zip(terms, kinds, strict=True) if kind == "sum"]
        if sums and found.length is not None:  # of another number of rows nothing might be known
            self._tell(_FIXED_NUMBER, who)
            return None
        return ScaledSums(self._step, sums) if sums else None

    def _rows_known_of(self, value: tf.Tensor) -> MeansAndSums | None:
        """Returns the rows of which a tensor is computed, if others can be made up for them."""
        found = self._of_data = self._of_data or self._means_and_sums()
        is_known = found.can_tell(value)
        return found if is_known and not self._step.is_traced_again(knows_number=found.length is not None) else None

    def _is_in_branch(self, found: MeansAndSums, value: tf.Tensor) -> bool:
        graphs = [each.graph for each in found.leaves] + [tf.compat.v1.get_default_graph()]
        return not all(each is value.graph for each in graphs) or is_compiled_by_xla()

    def _means_and_sums(self) -> MeansAndSums:
        rows = Rows(self._step.data)
        leaves = [
            (leaf, rows.probably_has_rows(place))
            for place, leaf in enumerate(tf.nest.flatten(self._step.data))
            if leaf is not None
        ]
        with_rows = [place for place, (_, has_rows) in enumerate(leaves) if has_rows]
        known: dict[Any, bool] = {}

        def depends_on_rows(tensor: tf.Tensor) -> bool:
            key = tensor_key(tensor)
            if key not in known:
                known[key] = self._step.depends_on_rows(tensor)
            return known[key]

        return MeansAndSums([leaf for leaf, _ in leaves], with_rows, depends_on_rows)

    def _of_all_ranks(
        self, found: MeansAndSums, rows: RowWise, value: tf.Tensor, inlined: Inlined, who: str, means: Means
    ) -> GlobalValue | None:
        """Returns a number computed from means and sums over the rows of all ranks, or else from these rows, or `None`.

        Collective: every rank must call this, in the same order.
        """
        graph = tf.compat.v1.get_default_graph()
        if any(each.op.name in self._computed_again for each in computed_of([value], lambda x: tensor_key(x) in means)):
            return None  # as of a gradient: no tape has recorded what was computed again
        with self._computing_again():
            try:
                parts = self._parts_of(found, rows, inlined(value), means)
                if any(parts.is_changed(each) for each in self._unrecorded.values() if each.graph is graph):
                    return None  # a copy would have the gradients that no tape takes
                of_all_ranks = OfAllRanks(self._step, parts, inlined, lambda own: self._gather(who, own))
                return GlobalValue(parts.value, of_all_ranks, inlined)
            except (LookupError, TypeError, ValueError, tf.errors.OpError):  # as of what has no gradient
                return None

    @contextlib.contextmanager
    def _computing_again(self) -> Iterator[None]:
        graph = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        try:
            yield
        finally:
            self._computed_again |= {each.name for each in graph.get_operations()[start:]}

    def _parts_of(self, found: MeansAndSums, rows: RowWise, value: tf.Tensor, means: Means) -> Aggregates | RowCut:
        """Returns of what a number is to be computed again.

        Raises:
            LookupError: if it cannot be.
        """
        fixed, numbers = self._known(), list(means.values())
        with contextlib.suppress(LookupError):
            return Aggregates(value, found, fixed, numbers)
        if not value.shape.is_fully_defined():
            raise LookupError(value.name)
        cut = RowCut([value], rows, fixed, numbers)
        if not found.can_run(value, [*fixed, *numbers]):
            raise LookupError(value.name)  # as where it has the number of a rank's rows written into it
        return cut

    def _known(self) -> list[tf.Tensor]:
        """Returns what does not count as computed from rows, though it is."""
        return [self._step.weight, self._step.share, *self._statistics]

    def _kind(self, found: MeansAndSums, value: tf.Tensor, means: Means) -> Kind | None:
        if tensor_key(value) in means:
            return "mean"
        fixed = [*means.values(), *self._known()]
        kind = found.kind(value, fixed)
        # What is computed from one that was told of is no news; and a sum that is divided by its rows is a mean.
        return kind if kind in ("mean", "sum") or not self._told else found.kind(value, [*fixed, *self._told])

    def _tell(self, text: str, who: str) -> None:
        if self._step.engine.rank == 0:
            once.warning(text.format(who))
