"""Losses, metrics and logs that a step computes by hand from its rank's rows: means over rows, sums, and others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from kdist.data.batch import Rows
from kdist.engines.engine import Engine
from kdist.keras_hooks.losses import layer_that_added, scaled_added_losses
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.trainer import computes_own_loss, layers_of
from kdist.reports.log import once
from kdist.state.graphs.linear_terms import linear_terms
from kdist.state.graphs.means_and_sums import Kind, MeansAndSums

_NO_MEAN = (
    "{} is computed from this rank's rows, and is neither a mean nor a sum over them: it relates rows, or is computed "
    "from means or sums, as of weights or a mask. It counts as a mean, and results differ from those of one process. "
    "Fix: compute it from rows of `kdist.all_gather`, or from means and sums of `kdist.all_reduce`"
)
_FIXED_NUMBER = (
    "{} is a sum over this rank's rows, and counts as a mean over them, as the step can only be traced for a fixed "
    "number of rows. Results differ from those of one process. Fix: read the number of rows by "
    "`keras.ops.shape(x)[0]`, or compute a mean"
)

_MAX_TERMS = 16  # of a number, as finding out about each takes time

Sums = Sequence[tuple[tf.Tensor, float]]
"""Sums over rows that are terms of a number, each with its factor."""

Means = dict[Any, tf.Tensor]
"""Tensors that count as means over the rank's rows, by graph and name."""


class OwnStep(Protocol):
    """What losses by hand need of a step."""

    data: Any
    weight: tf.Tensor
    share: tf.Tensor

    @property
    def engine(self) -> Engine:
        """How the ranks of this step communicate."""

    def depends_on_rows(self, value: tf.Tensor) -> bool:
        """Returns whether a tensor is computed from the rank's rows."""

    def is_traced_again(self, *, knows_number: bool) -> bool:
        """Returns whether the step is traced again, if its graph knows the number of its rows without that."""


class OwnLosses:
    """Makes the mean over the ranks of what a step computes by hand that of the global batch.

    What counts as a mean over the rank's rows is weighted by the rank's share of the rows. A sum over rows is divided
    by the share first. A number that is neither is warned of. In eager steps, and in graphs of which nothing is found
    out, all counts as a mean.

    Args:
        step: the open step.
    """

    def __init__(self, step: OwnStep) -> None:
        self._step = step
        self._loss = ""
        self._has_own_statistics = False
        self._sums: dict[Any, Sums] = {}
        self._differentiated: Means = {}
        self._means: Means = {}
        self._told: list[Any] = []

    def note_mean(self, value: Any) -> None:
        """Says that a loss counts as a mean over the rank's rows, whatever it is computed by."""
        if tf.is_symbolic_tensor(value):
            self._means[_key(value)] = value

    def as_differentiated_mean(self, value: Any) -> Any:
        """See `as_mean`; of the loss that the step is about to differentiate."""
        return self.as_mean(value, self._loss)

    def note_differentiated_mean(self, value: Any) -> None:
        """Says that the gradients of a number are those of a mean, whatever the number is."""
        self._differentiated[_key(value)] = value

    def compiled(self, loss: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        """Returns a function whose results count as means, whatever they are computed by."""

        def call(*args: Any, **kwargs: Any) -> tf.Tensor:
            value = loss(*args, **kwargs)
            self.note_mean(value)
            return value

        return call

    @contextlib.contextmanager
    def opened(self, model: keras.Model) -> Iterator[None]:
        """A context in which a model's step computes its losses."""
        self._loss = f"The loss that the step of {type(model).__name__} differentiates"
        # Such a layer relates the rank's rows, of which the log tells.
        self._has_own_statistics = any(isinstance(each, keras.layers.BatchNormalization) for each in layers_of(model))
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
            return original(tape, target, sources, output_gradients, *args, **kwargs)

        with patched(tf.GradientTape, "gradient", gradient):
            yield

    def _targets(self, targets: list[Any]) -> tuple[list[Any], list[tf.Tensor]] | None:
        """Returns what is differentiated in the place of targets, and with which factors; `None` for as they are.

        A term is scaled by being a target itself: what is computed after the forward pass is not on the tape.
        """
        found = [self._sums_in(each, self._loss, self._differentiated) for each in targets]
        if not any(found) or not all(isinstance(each, tf.Tensor) for each in targets):
            return None
        scaled = [(each, 1.0) for each in targets]
        scaled += [(term, self._excess(term, factor)) for terms in found for term, factor in terms]
        return [each for each, _ in scaled], [tf.fill(tf.shape(each), tf.cast(by, each.dtype)) for each, by in scaled]

    def _excess(self, term: tf.Tensor, factor: float) -> tf.Tensor:
        """Returns how often a sum is added to a number, of which it is a term, to be divided by this rank's weight.

        Args:
            term: tensor, the sum.
            factor: float, how often it is in the number.
        """
        weight = self._step.weight
        times = tf.math.divide_no_nan(tf.ones((), weight.dtype), weight) - 1  # without rows, the sum is taken away
        return tf.constant(factor, term.dtype) * tf.cast(times, term.dtype)

    def as_mean(self, value: Any, who: str) -> Any:
        """Returns a number of the step such that its weighted sum over the ranks is that of the global batch.

        Args:
            value: tensor or number.
            who: str, what it is, for messages.
        """
        sums = self._sums_in(value, who)
        for term, factor in sums:
            value = value + tf.cast(self._excess(term, factor) * term, value.dtype)
        if sums:
            self.note_mean(value)
        return value

    def _sums_in(self, value: Any, who: str, means: Means | None = None) -> Sums:
        """Returns the sums over rows that are terms of a number; the others are means, or nothing is known of them."""
        if not (tf.is_symbolic_tensor(value) and isinstance(value, tf.Tensor)):
            return ()
        key = _key(value), bool(means)
        if key not in self._sums:
            self._sums[key] = self._find_sums(value, who, {**self._means, **(means or {})})
        return self._sums[key]

    def _find_sums(self, value: tf.Tensor, who: str, means: Means) -> Sums:
        is_alone = self._step.engine.size == 1  # as with local SGD
        if is_alone or self._has_own_statistics or not self._step.depends_on_rows(value):
            return ()
        terms = linear_terms(value, lambda term: _key(term) in means)
        terms = [each for each in terms if self._step.depends_on_rows(each[0])]
        if all(_key(term) in means for term, _ in terms):
            return ()
        rows = Rows(self._step.data)
        leaves = [
            (leaf, rows.has_rows(place))
            for place, leaf in enumerate(tf.nest.flatten(self._step.data))
            if leaf is not None
        ]
        with_rows = [place for place, (_, has_rows) in enumerate(leaves) if has_rows]
        found = MeansAndSums([leaf for leaf, _ in leaves], with_rows, self._step.depends_on_rows)
        if not found.can_tell(value) or self._step.is_traced_again(knows_number=found.length is not None):
            return ()
        is_whole = found.length is not None or [term.name for term, _ in terms] == [value.name]  # factors may hold it
        if not is_whole and len(terms) <= _MAX_TERMS:
            kinds = [self._kind(found, term, means) for term, _ in terms]  # a small one says little about the whole
            if set(kinds) <= {"mean", "sum"}:
                return [each for each, kind in zip(terms, kinds, strict=True) if kind == "sum"]
        kind = self._kind(found, value, means)
        if kind == "other":
            self._told.append(value)
            self._tell(_NO_MEAN, who)
        if kind == "sum" and found.length is not None:  # of another number of rows nothing might be known
            self._tell(_FIXED_NUMBER, who)
            return ()
        return [(value, 1.0)] if kind == "sum" else ()

    def _kind(self, found: MeansAndSums, value: tf.Tensor, means: Means) -> Kind | None:
        if _key(value) in means:
            return "mean"
        ones = [*means.values(), self._step.weight, self._step.share]
        kind = found.kind(value, ones)
        # What is computed from one that was told of is no news; and a sum that is divided by its rows is a mean.
        return kind if kind != "other" or not self._told else found.kind(value, [*ones, *self._told])

    def _tell(self, text: str, who: str) -> None:
        if self._step.engine.rank == 0:
            once.warning(text.format(who))


def _key(value: Any) -> Any:
    return (value.graph, value.name) if tf.is_symbolic_tensor(value) else id(value)
