"""Losses that a step computes by hand: sums over the rank's rows, means over them, and what is neither."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.keras_hooks.losses import layer_that_added, wrapped_added_losses
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.trainer import computes_own_loss
from kdist.reports.log import once
from kdist.state.graphs.row_sums import Kind, RowSums

_DIVIDED = (
    "{} divides a sum over this rank's rows by a constant, and counts as a mean over these rows. That is right if the "
    "constant is their number, as `batch_size` is. Fix, if it is another one: multiply the sum by its reciprocal"
)
_CHANGED = (
    "The step of {} passes to `optimizer.apply` what it has computed from gradients of this rank's rows, as clipped "
    "ones, and the ranks' results are averaged. Results differ from those of one process. Fix: `global_clipnorm=`, "
    '`clipnorm=` or `clipvalue=` of the optimizer, or `kdist.all_reduce(gradients, "mean")` first'
)
_OTHER = (
    "{} is computed from this rank's rows, and counts as a mean over them. It is none, and no sum: it relates rows, or "
    "is computed from a mean or a sum, as of weights or a mask. Results differ from those of one process. Fix: compute "
    "it from rows of `kdist.all_gather`, or from means and sums of `kdist.all_reduce`"
)


class OwnStep(Protocol):
    """What losses by hand need of a step."""

    @property
    def data_tensors(self) -> list[tf.Tensor]:
        """The tensors of the data."""

    @property
    def engine(self) -> Engine:
        """How the ranks of this step communicate."""

    def depends_on_rows(self, value: tf.Tensor) -> bool:
        """Returns whether a tensor is computed from the rank's rows."""

    def per_share(self, value: tf.Tensor) -> tf.Tensor:
        """Divides by the weight of this rank's loss; that counts as a mean."""


class OwnLosses:
    """Makes sums over the rank's rows count as sums, where the graph shows that they are; warns of what is no mean.

    Args:
        step: the open step.
    """

    def __init__(self, step: OwnStep) -> None:
        self._step = step
        self._model = ""
        self._knows_gradients = False
        lengths = {each.shape[0] for each in step.data_tensors if each.shape.rank} - {None}
        self._sums = RowSums(lambda value: step.depends_on_rows(value), lengths)

    def note_mean(self, value: Any) -> None:
        """Says that a loss counts as a mean over the rank's rows, whatever it is computed by."""
        self._sums.note(value, "mean")

    def counted(self, loss: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        """Returns a function whose results count as means, whatever they are computed by."""

        def call(*args: Any, **kwargs: Any) -> tf.Tensor:
            value = loss(*args, **kwargs)
            self.note_mean(value)
            return value

        return call

    def note_same(self, value: Any, source: Any) -> None:
        """Says that a loss is scaled from another one."""
        self._sums.note(value, self._sums.kind_of(source))

    def as_mean(self, value: Any, who: str) -> Any:
        """Returns what the ranks' weighted mean is exact of: a sum over the rank's rows, divided by the weight.

        Args:
            value: tensor or number.
            who: str, what it is, for a warning if it is no sum and no mean.
        """
        kind = self._checked(value, who)
        if kind not in ("sum", "count"):
            return value
        return self._step.per_share(value if value.dtype.is_floating else tf.cast(value, keras.config.floatx()))

    @contextlib.contextmanager
    def opened(self, model: keras.Model) -> Iterator[None]:
        """A context in which a model's step computes its losses."""
        self._model = type(model).__name__

        def added(loss: Any, total: tf.Tensor) -> tf.Tensor:
            is_of_rows = tf.executing_eagerly() and loss.shape.rank and loss.shape[0] == self._num_rows()
            return self._step.per_share(total) if is_of_rows else self.as_mean(total, layer_that_added(model, loss))

        with contextlib.ExitStack() as stack:
            stack.enter_context(wrapped_added_losses(model, added))
            if computes_own_loss(model):
                stack.enter_context(self._gradients_of_sums())
            yield

    @contextlib.contextmanager
    def _gradients_of_sums(self) -> Iterator[None]:
        original = tf.GradientTape.gradient

        def gradient(
            tape: tf.GradientTape, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            are_weights = [isinstance(each, (tf.Variable, keras.Variable)) for each in tf.nest.flatten(sources)]
            if all(are_weights) and output_gradients is None:
                output_gradients = self._gradients_of(target, f"The loss that the step of {self._model} differentiates")
            gradients = original(tape, target, sources, output_gradients, *args, **kwargs)
            for each, is_weight in zip(tf.nest.flatten(gradients), are_weights, strict=True):
                if is_weight:
                    self.note_mean(each)
            self._knows_gradients = self._knows_gradients or any(are_weights)
            return gradients

        with patched(tf.GradientTape, "gradient", gradient):
            yield

    def _gradients_of(self, target: Any, who: str) -> Any:
        """Returns what the gradients of a target begin with, `None` if that is one."""
        targets = tf.nest.flatten(target)
        kinds = [self._checked(each, who) for each in targets]
        if not {"sum", "rows", "some"} & set(kinds):
            return None
        begins = [
            self._step.per_share(tf.ones_like(each)) if kind in ("sum", "rows", "some") else tf.ones_like(each)
            for each, kind in zip(targets, kinds, strict=True)
        ]
        return tf.nest.pack_sequence_as(target, begins)

    def _num_rows(self) -> int | None:
        return next((each.shape[0] for each in self._step.data_tensors if each.shape.rank), None)

    def check_gradients(self, gradients: Sequence[Any]) -> None:
        """Warns of gradients that are computed from those of a tape by more than sums and constant factors."""
        if self._knows_gradients and any(self._sums.kind_of(each) == "other" for each in gradients):
            self._warn(_CHANGED.format(self._model))

    def _checked(self, value: Any, who: str) -> Kind:
        """Returns what a number is made of, and warns once if that is no sum and no mean."""
        kind = self._sums.kind_of(value)
        if kind in ("divided", "other"):
            self.note_mean(value)  # what is computed from it has no more to say
            self._warn((_DIVIDED if kind == "divided" else _OTHER).format(who))
        return kind

    def _warn(self, text: str) -> None:
        if self._step.engine.rank == 0 and self._step.engine.size > 1:  # with local SGD each step has one rank
            once.warning(text)
