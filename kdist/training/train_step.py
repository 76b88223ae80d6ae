"""A rank's part of a training step: one message makes its update that of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.data.shard import Shard
from kdist.errors import NotSynchronizedError, StrategyError
from kdist.gradients.wire import Wire
from kdist.strategies.all_reduce import AllReduceExtended
from kdist.training import _keras_internals as internals
from kdist.training.assigned_state import AssignedState
from kdist.training.fused_sgd import fused_sgd
from kdist.training.learning_rate import EffectiveRate
from kdist.training.optimizers import innermost, optimizers_of
from kdist.training.requests import NAMES, Requests
from kdist.training.step import Step


class TrainStep(Step):
    """A step that updates weights: every optimizer gets reduced gradients.

    Args:
        extended: the strategy's `AllReduceExtended`.
        shard: `Shard`, this rank's rows and the counts.
        wire: `Wire`, how the gradients travel.
        rate_of: callable that returns the `EffectiveRate` of an innermost optimizer.
        scaled: bool, whether updates take the scaled rate: not where the user's own batch is split.
        requests: `Requests`, what this rank's callbacks ask of all ranks.
        deferring: the optimizer whose gradients travel once an update and not in every step, if there is one.

    Attributes:
        local_gradients: list of tensors and `None`, this rank's own part of the gradients that an optimizer applies.
    """

    def __init__(
        self,
        extended: AllReduceExtended,
        shard: Shard,
        *,
        wire: Wire,
        rate_of: Callable[[keras.optimizers.Optimizer], EffectiveRate],
        scaled: bool,
        requests: Requests,
        deferring: keras.optimizers.Optimizer | None,
    ) -> None:
        super().__init__(extended, shard)
        self._wire = wire
        self._rate_of = rate_of
        self._scaled = scaled
        self._requests = requests
        self._deferring = deferring
        self._state: AssignedState | None = None
        self._weighted_losses: list[int] = []
        self._any_loss_was_scaled = False
        self.local_gradients: list[Any] = []

    @contextlib.contextmanager
    def running(self, model: keras.Model) -> Iterator[None]:
        """Opens the step on a model; at its end every rank has the same weights, optimizer and statistics."""
        with super().running(model), contextlib.ExitStack() as stack:
            self._state = stack.enter_context(AssignedState(internals.state_variables(model)))
            for optimizer in optimizers_of(model):
                stack.enter_context(self._reducing(optimizer))
            yield
            self._merge(self._state)

    def _merge(self, written: AssignedState) -> None:
        """Merges statistics that were written after the last gradients' message, or without any."""
        if written.is_dirty:
            written.merge(self._extended.reduce_sum(written.contributions(self)))

    @contextlib.contextmanager
    def _reducing(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        """Makes an optimizer reduce before it does anything else: clipping, finite check, update."""
        apply, apply_gradients, scale_loss = optimizer.apply, optimizer.apply_gradients, optimizer.scale_loss

        def scale_weighted_loss(loss: tf.Tensor) -> tf.Tensor:
            # The place for the weight, where the step asks: one product, and float16 gradients of their usual size.
            self.loss_is_weighted = True
            self._any_loss_was_scaled = True
            self._weighted_losses.append(id(optimizer))
            return scale_loss(loss * tf.cast(self.weight, loss.dtype))

        def reduce_and_apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            variables = trainable_variables or innermost(optimizer)._trainable_variables
            with self._reduced(list(grads), variables, optimizer) as reduced:
                return apply(reduced, trainable_variables)

        def reduce_and_apply_gradients(grads_and_vars: Any) -> Any:
            # Of its own, for an optimizer of the user's may clip here before it calls `apply`.
            grads, variables = zip(*grads_and_vars, strict=True)
            with self._reduced(list(grads), variables, optimizer) as reduced:
                return apply_gradients(zip(reduced, variables, strict=True))

        wrappers = {
            "apply": reduce_and_apply,
            "apply_gradients": reduce_and_apply_gradients,
            "scale_loss": scale_weighted_loss,
        }
        optimizer.__dict__.update(wrappers)
        try:
            yield
        finally:
            for name in wrappers:
                del optimizer.__dict__[name]

    @contextlib.contextmanager
    def _reduced(
        self, grads: list[Any], variables: Sequence[Any], optimizer: keras.optimizers.Optimizer
    ) -> Iterator[list[Any]]:
        """Gives the global gradients, and the effective rate to the optimizer while they are applied."""
        if self.applying or not grads:
            yield grads  # an inner optimizer, or the same one further down: they are reduced
            return
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            self._refuse_loss_scale()
        # A step that adds gradients up by itself may hand over its variables.
        grads = [
            each if each is None or isinstance(each, tf.IndexedSlices) else tf.convert_to_tensor(each) for each in grads
        ]
        self.local_gradients = grads
        rate = self._rate_of(innermost(optimizer))
        given = [place for place, grad in enumerate(grads) if grad is not None]
        maxima = [place for place in given if getattr(variables[place], "overwrite_with_gradient", False)]
        summed = [place for place in given if place not in maxima]
        is_weighted = self._take_weighted_loss(optimizer)
        sums = self._sum(
            [grads[place] for place in summed],
            [variables[place] for place in summed],
            prepare=self._zeros_if_idle if is_weighted else self._weighted_each,
            held=self._held(optimizer, variables, summed),
            rate=rate,
        )
        largest = self._largest([grads[place] for place in maxima])
        reduced = dict(zip([*summed, *maxima], [*sums, *largest], strict=True))
        self.applying = True
        try:
            with fused_sgd(rate.optimizer), rate.applied() if self._scaled else contextlib.nullcontext():
                yield [reduced.get(place) for place in range(len(grads))]
        finally:
            self.applying = False

    def _refuse_loss_scale(self) -> None:
        """Raises where a scale of the loss that changes does harm."""
        if self._wire.keeps_residuals:
            raise StrategyError(
                "What compression leaves out of a gradient cannot be kept while the scale of the loss changes. "
                "Received: a LossScaleOptimizer, as mixed_float16 makes it, with compression='powersgd' or 'topk'. "
                "Expected gradients of one scale. Fix: mixed_bfloat16, or compression='fp16'."
            )

    def _take_weighted_loss(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Returns whether an optimizer's gradients come from a loss that it was asked to scale."""
        if id(optimizer) in self._weighted_losses:
            self._weighted_losses.remove(id(optimizer))
            self.loss_is_weighted = bool(self._weighted_losses)
            return True
        if self._any_loss_was_scaled:
            raise NotSynchronizedError(
                f"A training step asks some of its optimizers to scale the loss, and others not. Received: "
                f"{type(optimizer).__name__}.apply without a `scale_loss` of its own before it. Expected "
                "`loss = optimizer.scale_loss(loss)` for each of the step's updates, or for none: kdist weights the "
                "loss there. Fix: call it for each optimizer, before its gradients are taken."
            )
        return False

    def _held(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any], places: Sequence[int]
    ) -> list[tf.Variable] | None:
        """Returns where an optimizer adds up some of this rank's gradients until its update, if they travel with it."""
        if self._deferring is None or optimizer is not self._deferring:
            return None
        if not optimizer.built:
            optimizer.build(variables)
        accumulators = internals.accumulators(optimizer, variables)
        return [accumulators[place] for place in places]

    def _sum(
        self,
        grads: list[Any],
        variables: list[Any],
        *,
        prepare: Callable[[Sequence[Any]], list[Any]],
        held: list[tf.Variable] | None,
        rate: EffectiveRate,
    ) -> list[Any]:
        """Sends gradients, statistics and requests in one message; returns the global gradients.

        Args:
            grads: list of tensors and `tf.IndexedSlices`.
            variables: list of variables, one for each gradient.
            prepare: callable that makes of gradients what this rank adds.
            held: list of variables or `None`, where this rank's gradients are added up until their update.
            rate: `EffectiveRate`, of the optimizer.
        """
        state = self._state
        if state is None:
            raise NotSynchronizedError("A gradient was reduced outside of a running step.")
        statistics = state.contributions(self)
        # As float32, like most gradients, they share a buffer.
        request = self._asked_for([rate])
        if held is None:
            sent = self._wire.sum(grads, [*statistics, request], variables=variables, prepare=prepare)
        else:
            is_due = internals.is_update_due(rate.optimizer)
            sent = self._sum_if_due(is_due, prepare(grads), variables, held, statistics, request)
        sums, (*merged, requests) = sent
        state.merge(merged)
        self._grant(requests, [rate])
        return sums

    def _sum_if_due(
        self,
        is_due: tf.Tensor,
        addends: list[Any],
        variables: Sequence[Any],
        held: list[tf.Variable],
        statistics: list[tf.Tensor],
        request: tf.Tensor,
    ) -> tuple[list[Any], list[Any]]:
        """Sends gradients if their update is due, and what is held of the steps before; else this rank keeps them."""
        mine = [tf.convert_to_tensor(each) for each in addends]  # the sum has a place for each row, as Keras' has

        def send() -> tuple[list[Any], list[Any]]:
            together = [each + tf.cast(before, each.dtype) for each, before in zip(mine, held, strict=True)]
            sent = self._wire.sum(together, [*statistics, request], variables=variables)
            for each in held:
                each.assign(tf.zeros_like(each))
            return sent

        def keep() -> tuple[list[Any], list[Any]]:
            return mine, [*(self._extended.reduce_sum(statistics) if statistics else []), tf.zeros_like(request)]

        return tf.cond(is_due, send, keep)

    def _largest(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the elementwise maxima over the active ranks.

        The scales and histories of float8 layers come as gradients, but are the largest absolute values in a batch:
        that of all rows is the largest of the ranks'.
        """
        own = [tf.where(self.active, value, tf.zeros_like(value)) for value in values]
        gathered = self._extended.engine.allgather([value[tf.newaxis] for value in own]) if own else []
        return [tf.reduce_max(value, axis=0) for value in gathered]

    def _weighted_each(self, grads: Sequence[Any]) -> list[Any]:
        """Returns gradients, multiplied by this rank's share."""
        return [self.weighted(grad) for grad in grads]

    def _zeros_if_idle(self, grads: Sequence[Any]) -> list[Any]:
        """Returns gradients of a weighted loss; zeros on an idle rank, where 0 times NaN would be NaN."""
        values = [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]
        values = tf.cond(self.active, lambda: values, lambda: [tf.zeros_like(value) for value in values])
        return [
            tf.IndexedSlices(value, grad.indices, grad.dense_shape) if isinstance(grad, tf.IndexedSlices) else value
            for grad, value in zip(grads, values, strict=True)
        ]

    def _asked_for(self, rates: Sequence[EffectiveRate]) -> tf.Tensor:
        """Returns what this rank's callbacks ask for: other rates, and what `Requests` are."""
        return tf.concat([self._requests.sent, [rate.is_asked_for() for rate in rates]], axis=0)

    def _grant(self, requests: tf.Tensor, rates: Sequence[EffectiveRate]) -> None:
        """Does what some rank asked for, on all ranks; nearly always nobody asks, and little is run."""

        def grant() -> None:
            asked = self._extended.reduce_sum([rate.request() for rate in rates]) if rates else []
            for rate, request in zip(rates, asked, strict=True):
                rate.agree(request)
            tf.numpy_function(self._requests.note, [requests[: len(NAMES)]], [])

        tf.cond(tf.reduce_any(requests > 0), grant, lambda: None)
