"""The stages that weight a rank's gradients, and sum them over the ranks in one message with statistics and votes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.errors import NotSynchronizedError, StrategyError
from kdist.gradients.reducer import GradientReducer
from kdist.keras_hooks.layers.embedding import table_of
from kdist.keras_hooks.optimizers import accumulators, innermost, is_update_due, trained_variables
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.variables import key_of, raw_variable
from kdist.learning_rate.effective_rate import EffectiveRate
from kdist.state.votes import NAMES, Votes
from kdist.step.buffers import BufferSync
from kdist.step.step import Step
from kdist.step.update import Stage, Update
from kdist.strategies.update_chain import UpdateChain


class WeightGradients(Stage):
    """Multiplies the loss by the rank's weight where the step calls `scale_loss`, else each gradient.

    The weight is the rank's rows over the global rows. The loss is the better place, and Keras' own step calls
    `scale_loss`: one product, and `float16` gradients keep their magnitude. The stage itself then only makes an idle
    rank's gradients zeros.
    """

    phase = "weigh"

    def __init__(self, step: Step) -> None:
        self._step = step
        self._weighted: list[int] = []  # ids of optimizers whose loss is weighted and that have not updated yet
        self._any_was_weighted = False
        self._results: list[tf.Tensor] = []  # weighted losses

    @contextlib.contextmanager
    def opened(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        """Weights the loss in `scale_loss`."""
        scale_loss = optimizer.scale_loss

        def scale_weighted_loss(loss: tf.Tensor) -> tf.Tensor:
            self._step.loss_is_weighted = self._any_was_weighted = True
            self._weighted.append(id(optimizer))
            if any(loss is each for each in self._results):  # for another optimizer of the step
                self._results.append(scale_loss(loss))
                return self._results[-1]
            mean = self._step.custom_losses.as_differentiated_mean(loss)
            # A step may return the value in its logs, which are averaged over the ranks: only the gradient is weighted.
            weighted = scale_loss(mean * tf.cast(self._step.weight, loss.dtype))
            result = tf.custom_gradient(_with_gradient_of)(weighted, scale_loss(loss))
            self._step.custom_losses.note_differentiated_mean(result)
            self._results.append(result)
            return result

        with patched(optimizer, "scale_loss", scale_weighted_loss):
            yield

    def __call__(self, update: Update, proceed: Callable[[], Any]) -> Any:
        """Sets how this rank's terms are computed.

        Collective: every rank must call this, in the same order, of gradients that a step has computed from others.
        """
        update.gradients = self._step.custom_losses.applied(update.gradients)
        update.terms = self._zeros_if_idle if self._take_weighted_loss(update.optimizer) else self._weighted_each
        return proceed()

    def _take_weighted_loss(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Returns whether an optimizer has scaled the loss of these gradients."""
        if id(optimizer) in self._weighted:
            self._weighted.remove(id(optimizer))
            self._step.loss_is_weighted = bool(self._weighted)
            return True
        if self._any_was_weighted:
            raise NotSynchronizedError(
                f"A training step scales the loss for some optimizers only. Received: "
                f"{type(optimizer).__name__}.apply without a call of its `scale_loss` before. Expected "
                "`loss = optimizer.scale_loss(loss)` for each of the step's updates, or for none: kdist weights the "
                "loss there. Fix: call it for each optimizer, before its gradients are computed."
            )
        return False

    def _weighted_each(self, gradients: Sequence[Any]) -> list[Any]:
        return [self._step.weighted(gradient) for gradient in gradients]

    def _zeros_if_idle(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns the gradients; zeros on an idle rank, where they could be NaN.

        What is equal on all ranks, as what a step has accumulated, is no term: each adds its share.
        """
        values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
        values = [each if self._step.depends_on_rows(each) else self._step.weighted(each) for each in values]
        values = tf.cond(self._step.active, lambda: values, lambda: [tf.zeros_like(value) for value in values])
        return [
            tf.IndexedSlices(value, each.indices, each.dense_shape) if isinstance(each, tf.IndexedSlices) else value
            for each, value in zip(gradients, values, strict=True)
        ]


class VoteMessage:
    """Votes, and flags for learning rates that callbacks have changed, as one vector in the step's message."""

    def __init__(self, step: Step, votes: Votes) -> None:
        self._step = step
        self._votes = votes

    def vector(self, rates: Sequence[EffectiveRate]) -> tf.Tensor:
        """Returns this rank's term, a `float32` vector: the dtype of most gradients, so that they share a buffer."""
        return tf.concat([self._votes.sent, [rate.agreed.is_changed() for rate in rates]], axis=0)

    def apply(self, counts: tf.Tensor, rates: Sequence[EffectiveRate]) -> None:
        """Applies votes and changes of any rank on all ranks; sends a message only if there are some."""

        def apply() -> None:
            changes = self._step.engine.allreduce([rate.agreed.local_change() for rate in rates]) if rates else []
            for rate, change in zip(rates, changes, strict=True):
                rate.agreed.apply_change(change)
            tf.numpy_function(self._votes.receive, [counts[: len(NAMES)]], [])

        tf.cond(tf.reduce_any(counts > 0), apply, lambda: None)


class Reduce(Stage):
    """Sums gradients over the ranks in every step."""

    phase = "reduce"

    def __init__(
        self,
        step: Step,
        reducer: GradientReducer,
        buffers: BufferSync,
        votes: VoteMessage,
        rate_of: Callable[[keras.optimizers.Optimizer], EffectiveRate],
    ) -> None:
        self._step = step
        self._reducer = reducer
        self._buffers = buffers
        self._votes = votes
        self._rate_of = rate_of

    def __call__(self, update: Update, proceed: Callable[[], Any]) -> Any:
        """Replaces this rank's gradients by the global ones."""
        with self._buffers.suspended():
            return self._reduce_and(update, proceed)

    def _reduce_and(self, update: Update, proceed: Callable[[], Any]) -> Any:
        if isinstance(update.optimizer, keras.optimizers.LossScaleOptimizer):
            self._check_loss_scale()
        if not update.optimizer.built:  # as in plain Keras the first update of a step of the user's builds it
            update.optimizer.build(self._variables_of_all_ranks(update.variables))
        update.variables, update.gradients = agreed_gradients(
            self._step.engine, update.optimizer, update.variables, update.gradients
        )
        update.local = update.gradients
        given = [place for place, gradient in enumerate(update.gradients) if gradient is not None]
        maxima = [p for p in given if getattr(update.variables[p], "overwrite_with_gradient", False)]
        summed = [place for place in given if place not in maxima]
        sums = self._sum(update, summed)
        largest = self._largest([update.gradients[place] for place in maxima])
        reduced = dict(zip([*summed, *maxima], [*sums, *largest], strict=True))
        update.gradients = [reduced.get(place) for place in range(len(update.gradients))]
        self._step.applying = True  # the strategy refuses updates at any other time, and leaves these alone
        try:
            with self._step.updating(UpdateChain() if self._reducer.sends_once else None):
                return proceed()
        finally:
            self._step.applying = False

    def _variables_of_all_ranks(self, variables: list[Any]) -> list[Any]:
        """Returns the variables of an update, with those that an eager step has left out on this rank alone.

        Collective in an eager step: every rank must call this, in the same order.
        """
        if not tf.executing_eagerly() or self._step.engine.size == 1:
            return variables
        weights, keys = {key_of(each): each for each in self._step.weights}, {key_of(each) for each in variables}
        everyone = self._step.engine.gather_objects([place for place, key in enumerate(weights) if key in keys])
        if all(each == everyone[0] for each in everyone):
            return variables
        places, known = sorted({place for each in everyone for place in each}), list(weights.values())
        return [*(known[place] for place in places), *(each for each in variables if key_of(each) not in weights)]

    def _check_loss_scale(self) -> None:
        if self._reducer.keeps_residuals:
            raise StrategyError(
                "Error feedback does not support loss scaling. Received: a LossScaleOptimizer (mixed_float16), with "
                "compression='powersgd' or 'topk'. Expected gradients of one scale. Fix: use mixed_bfloat16, or "
                "compression='fp16'."
            )

    def _sum(self, update: Update, places: Sequence[int]) -> list[Any]:
        """Returns the global gradients at some indices."""
        rates = [self._rate_of(innermost(update.optimizer))]
        statistics, votes = self._buffers.contributions(), self._votes.vector(rates)
        sums, (*merged, counts) = self._send(update, places, [*statistics, votes])
        self._buffers.merge(merged)
        self._votes.apply(counts, rates)
        return sums

    def _send(self, update: Update, places: Sequence[int], exact: list[tf.Tensor]) -> tuple[list[Any], list[Any]]:
        """Returns the sums over the ranks of the gradients at some indices, and of tensors that stay exact."""
        gradients, variables = _at(places, update.gradients), _at(places, update.variables)
        if self._reducer.is_compressed:
            return self._reducer.sum(gradients, exact, variables=variables, terms=update.terms)
        are_equal = [has_equal_indices(self._step, each) for each in gradients]
        sent = [each.values if is_it else each for each, is_it in zip(gradients, are_equal, strict=True)]
        sums, others = self._reducer.sum(sent, exact, variables=variables, terms=update.terms)
        slices = [
            tf.IndexedSlices(total, each.indices, each.dense_shape) if is_it else total
            for total, each, is_it in zip(sums, gradients, are_equal, strict=True)
        ]
        return slices, others

    def _largest(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the elementwise maxima over the active ranks.

        The "gradients" of float8 layers' scales and histories are the largest absolute values of a batch.
        """
        local = [tf.where(self._step.active, value, tf.zeros_like(value)) for value in values]
        gathered = self._step.engine.allgather([value[tf.newaxis] for value in local]) if local else []
        return [tf.reduce_max(value, axis=0) for value in gathered]


class ReduceWhenDue(Reduce):
    """Sums accumulated gradients once per update; see `LocalAccumulation`."""

    def _send(self, update: Update, places: Sequence[int], exact: list[tf.Tensor]) -> tuple[list[Any], list[Any]]:
        optimizer = update.optimizer
        held = _at(places, accumulators(optimizer, update.variables))
        variables = _at(places, update.variables)
        # Dense, as Keras' accumulators are.
        local = [tf.convert_to_tensor(each) for each in update.terms(_at(places, update.gradients))]
        *statistics, votes = exact

        def send() -> tuple[list[Any], list[Any]]:
            together = [each + tf.cast(before, each.dtype) for each, before in zip(local, held, strict=True)]
            sent = self._reducer.sum(together, exact, variables=variables)
            for each in held:
                each.assign(tf.zeros_like(each))
            return sent

        def keep() -> tuple[list[Any], list[Any]]:
            merged = self._step.engine.allreduce(statistics) if statistics else []
            return local, [*merged, tf.zeros_like(votes)]

        return tf.cond(is_update_due(innermost(optimizer)), send, keep)


def agreed_gradients(
    engine: Engine, optimizer: Any, variables: Sequence[Any], gradients: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns an update's variables and gradients, in an eager step with those that other ranks alone have.

    An eager step may ask for its rows in Python, and use other layers on each rank. A gradient is zeros where a rank
    has none. Where all ranks have gradients of the same variables, or in a graph, nothing changes.

    Collective in an eager step: every rank must call this, in the same order.

    Args:
        engine: `Engine`, how the ranks of the step communicate.
        optimizer: `keras.optimizers.Optimizer`.
        variables: sequence of variables.
        gradients: sequence of tensors, `tf.IndexedSlices` and `None`, one for each variable.
    """
    if engine.size == 1 or not tf.executing_eagerly():
        return list(variables), list(gradients)
    inner = innermost(optimizer)
    known = [each for each in (trained_variables(inner) if inner.built else variables) if table_of(each) is None]
    given = {key_of(v): gradient for v, gradient in zip(variables, gradients, strict=True) if gradient is not None}
    kinds = [_kind(given.get(key_of(each))) for each in known]
    (counts,) = engine.allreduce([tf.one_hot(kinds, 3, dtype=tf.int32)])
    numbers = counts.numpy()
    if (numbers.max(axis=1, initial=0) == engine.size).all():
        return list(variables), list(gradients)
    others = [(v, g) for v, g in zip(variables, gradients, strict=True) if all(v is not each for each in known)]
    agreed = [
        (each, _dense(each, given.get(key_of(each))) if of_kind.max() < engine.size else given[key_of(each)])
        for each, of_kind in zip(known, numbers, strict=True)
        if of_kind[0] < engine.size
    ]
    return [each for each, _ in [*agreed, *others]], [gradient for _, gradient in [*agreed, *others]]


def _kind(gradient: Any) -> int:
    return 0 if gradient is None else 2 if isinstance(gradient, tf.IndexedSlices) else 1


def _dense(variable: Any, gradient: Any) -> tf.Tensor:
    raw = raw_variable(variable)
    return tf.zeros(raw.shape, raw.dtype) if gradient is None else tf.convert_to_tensor(gradient)


def has_equal_indices(step: Step, gradient: Any) -> bool:
    """Returns whether a gradient is of rows of a table that are the same on all ranks, as of positions in a text.

    In one process each of these rows has one slice. An optimizer that squares gradients takes each slice by itself, so
    slices of all ranks must be added up, not gathered.
    """
    is_sparse = isinstance(gradient, tf.IndexedSlices) and step.engine.size > 1
    return is_sparse and not step.depends_on_rows(gradient.indices)


def _with_gradient_of(source: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
    del source
    return tf.identity(value), lambda upstream: (upstream, None)


def _at(places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    return [values[place] for place in places]
