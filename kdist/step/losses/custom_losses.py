"""Losses, metrics and logs that a step computes by hand from its rank's rows: means over rows, sums, and others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.losses import layer_that_added, scaled_added_losses
from kdist.keras_hooks.trainer import computes_custom_loss
from kdist.state.graphs.rank_dependence import tensor_key
from kdist.step.losses.global_value import GlobalValue
from kdist.step.losses.related_layers import warn_of_related_layers
from kdist.step.losses.step_gradients import StepGradients
from kdist.step.losses.step_numbers import KEPT, StepNumbers
from kdist.step.losses.step_pairs import Gather, StepPairs
from kdist.step.losses.step_rows import StepRows
from kdist.step.losses.taped_gradients import TapedGradients
from kdist.strategies.open_step import OpenStep

_APPLIED = (
    "The step of {} applies gradients that it computes from this rank's, as by clipping, and kdist cannot compute them "
    "from those of all ranks: results differ from those of one process. Fix: compute them from what "
    '`kdist.all_reduce(gradients, "mean")` returns, or by `clipnorm=` of the optimizer'
)
_EAGER = (
    "{} computes losses by itself in eager steps (run_eagerly=True). They count as means over the rank's rows, as only "
    "a graph shows what they are. A sum is too small then. Fix: train without run_eagerly=True"
)


class CustomLosses:
    """Makes the mean over the ranks of what a step computes by hand that of the global batch.

    What counts as a mean over the rank's rows is weighted by the rank's share of the rows. A sum over rows is divided
    by the share first. What is computed from sums and means is computed from those of all ranks. A number that is none
    of these is warned of. In eager steps, and in graphs of which nothing is found out, all counts as a mean.

    Args:
        step: the open step.
        rows: `StepRows` of the step.
    """

    def __init__(self, step: OpenStep, rows: StepRows) -> None:
        self._step = step
        self._model = self._loss = ""
        self._rows = rows
        self._has_custom_loss = False
        self._pairs = StepPairs(step, rows, lambda _, own: own)
        self._gradients = StepGradients(step)
        self._numbers = StepNumbers(step, rows, self._gradients)
        self._taped = TapedGradients(step, rows, self._numbers, self._gradients)

    def is_gradient(self, value: tf.Tensor) -> bool:
        """Returns whether a tensor is a gradient that a tape has returned, whose mean by rows is the global one."""
        return self._gradients.are_means(value)

    def applied(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns gradients that a step applies; those that it has computed from others, or from rows, of all ranks'.

        Collective: every rank must call this, in the same order.
        """
        with self._rows.computing_again():
            found = self._gradients.applied(gradients, {**self._numbers.means, **self._rows.means})
        if found is None:
            self._numbers.warn(_APPLIED, self._model)
            return list(gradients)
        return list(map(self._applied_by_hand, found)) if self._has_custom_loss else found

    def _applied_by_hand(self, gradient: Any) -> Any:
        """Returns a gradient that no tape of the step has returned, so that its mean by rows is the global one.

        Collective: every rank must call this, in the same order.
        """
        if not self._rows.is_of_rows(gradient) or self._gradients.is_known(gradient):
            return gradient
        if self._rows.of(gradient) is None or self._rows.row_wise(gradient) is None:
            return gradient
        with self._rows.computing_again():
            found = self._numbers.find(gradient, "")
            if found is None and not self._numbers.is_mean(gradient):
                return gradient
            own = gradient if found is None else found.as_mean(gradient)
            return self._step.weighted(own) if self._step.loss_is_weighted else own

    def as_differentiated_mean(self, value: Any) -> Any:
        """See `as_mean`; of the loss that the step is about to differentiate.

        Collective: every rank must call this, in the same order.
        """
        return self.as_mean(value, self._loss)

    def note_differentiated_mean(self, value: Any) -> None:
        """Says that the gradients of a number are those of a mean, whatever the number is."""
        self._taped.means[tensor_key(value)] = value

    def compiled(self, loss: Callable[..., tf.Tensor], of_rows: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        """Returns a function that computes a loss; every rank must call that, in the same order.

        Args:
            loss: callable, the compiled loss.
            of_rows: callable, the same for arguments whose rows are each computed from one of the data. Its results
                count as means, whatever they are computed by; those of `loss` as what a step computes by hand.
        """

        def call(*args: Any, **kwargs: Any) -> tf.Tensor:
            if not self._has_custom_loss:
                warn_of_related_layers(self._step.engine, self._rows, (args, kwargs))
            elif self._pairs.relates_rows((args, kwargs)):
                return loss(*args, **kwargs)
            value = of_rows(*args, **kwargs)
            self._rows.note_mean(value)
            return value

        return call

    def of_all_ranks(self, values: Any, who: str) -> Any | None:
        """See `StepPairs.of_all_ranks`; `None` on one rank.

        Collective: every rank must call this, in the same order.
        """
        return self._pairs.of_all_ranks(values, who) if self._step.engine.size > 1 else None

    @contextlib.contextmanager
    def opened(self, model: keras.Model, gather: Gather) -> Iterator[None]:
        """A context in which a model's step computes its losses.

        Args:
            model: `keras.Model`.
            gather: callable that takes what a number is, for messages, and rows of this rank that it is computed from,
                and returns those of all ranks.
        """
        self._numbers.gather = gather
        self._has_custom_loss = computes_custom_loss(model) and self._step.engine.size > 1
        self._pairs = StepPairs(self._step, self._rows, gather)
        self._model = type(model).__name__
        self._loss = f"The loss that the step of {self._model} differentiates"
        if self._has_custom_loss and tf.executing_eagerly():
            self._numbers.warn(_EAGER, type(model).__name__)
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                scaled_added_losses(model, lambda loss, total: self.as_mean(total, layer_that_added(model, loss)))
            )
            if computes_custom_loss(model):
                stack.enter_context(self._taped.patched(self._model, self._loss))
            yield

    def as_mean(self, value: Any, who: str) -> Any:
        """Returns a number of the step such that its weighted sum over the ranks is that of the global batch.

        Collective: every rank must call this, in the same order.

        Args:
            value: tensor or number.
            who: str, what it is, for messages.
        """
        found = self._numbers.find(value, who)
        if found:
            value = found.as_mean(value)
            self._rows.note_mean(value)
        return value

    def as_sum(self, value: tf.Tensor, who: str) -> tf.Tensor:
        """Returns a number of the step such that its sum over the ranks is that of the global batch.

        Where nothing is found out about it, it counts as a sum over rows.

        Collective: every rank must call this, in the same order.

        Args:
            value: symbolic tensor.
            who: see `as_mean`.
        """
        if self._step.engine.size == 1:  # as with local SGD
            return value
        if self._step.depends_on_rows(value):
            if self._numbers.kind_of(value) in ("sum", None):
                return value
            value = self.as_mean(value, who)
        return tf.math.multiply_no_nan(value, tf.cast(self._step.share, value.dtype))

    def as_weighted(self, value: tf.Tensor, weight: tf.Tensor, who: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a number and its weight so that over the ranks their products and weights are the global batch's.

        Where that is not found out, as in a branch, each rank's own are returned.

        Collective: every rank must call this, in the same order.

        Args:
            value: symbolic tensor of the step.
            weight: tensor of its dtype.
            who: see `as_mean`.
        """
        step = self._step
        of_rows = [each for each in (value, weight) if step.depends_on_rows(each)]
        is_found_out = bool(of_rows) and all(self._rows.of(each) and self._rows.row_wise(each) for each in of_rows)
        if step.engine.size == 1 or not is_found_out:
            return value, weight
        if self._numbers.kind_of(weight) == "sum" and self._numbers.kind_of(value * weight) == "sum":
            return value, weight  # as a mean over tokens, by their number
        value = self.as_mean(value, who)
        if step.depends_on_rows(weight):
            (weight,) = step.engine.allreduce([step.weighted(self.as_mean(weight, who))])
        elif step.may_differ(weight):  # a number of rows
            return value, weight
        return value, tf.math.multiply_no_nan(weight, tf.cast(step.share, weight.dtype))

    def of_state(self, value: tf.Tensor, *, is_weight: bool) -> tf.Tensor | None:
        """Returns what the rows of all ranks make of a tensor that the step keeps; `None` if that is not found out.

        Collective: every rank must call this, in the same order.

        Args:
            value: symbolic tensor of a known shape.
            is_weight: bool, whether it is written to a weight: what has the rank's share of the rows in it may be
                computed from a gradient that is not known as one.
        """
        is_alone = self._step.engine.size == 1  # as with local SGD
        if is_alone or self._rows.is_in_branch(value) or self._rows.of(value) is None:
            return None
        if self._rows.row_wise(value) is None:
            return None
        if not value.dtype.is_floating:  # made-up rows show little of integers and flags
            return self._pairs.of_rows(value, KEPT)
        with self._rows.computing_again():
            of_gradients = self._gradients.of_all_ranks(value, {**self._numbers.means, **self._rows.means})
            if of_gradients is not None or (is_weight and self._gradients.is_known(value)):
                return of_gradients
            found = self._numbers.find(value, "")
            if isinstance(found, GlobalValue):
                return found.as_mean(value)
            if found is None and not self._numbers.is_mean(value):
                return None
            own = value if found is None else found.as_mean(value)
            return self._step.engine.allreduce([self._step.weighted(own)])[0]
