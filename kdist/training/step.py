"""One training, test or predict step of one rank, traced or run eagerly: what makes it a share of the global step."""

from __future__ import annotations

import contextlib
import copy
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
from kdist.training.averaging import Averaging
from kdist.training.fused_sgd import fused_sgd
from kdist.training.learning_rate import EffectiveRate
from kdist.training.losses import GlobalLoss
from kdist.training.metrics import flat_metrics, scalars_weighted
from kdist.training.optimizers import innermost, optimizers_of
from kdist.training.requests import NAMES, Requests


class Step:
    """A rank's part of a global step.

    The global loss is the sum over ranks of `weight` times the rank's loss, and so is its gradient; the weight is
    the rank's share of the global batch's rows. A rank without data runs one real row at weight 0.

    Args:
        extended: the strategy's `AllReduceExtended`.
        shard: `Shard`, this rank's rows and the counts. Empty `global_rows` are asked of the other ranks, and a
            step in which no rank has rows ends the pass over the data on all of them.

    Attributes:
        data: structure of tensors, what the user's step gets.
        rows: `int64` scalar, this rank's rows that count.
        share: `float64` scalar, this rank's share of the global rows.
        weight: `float64` scalar, how much this rank's loss counts: by its share, where ranks make a step together.
        active: `bool` scalar, whether this rank has rows that count.
        applying: bool, whether an optimizer works on reduced gradients.
        loss_is_weighted: bool, whether the backward pass starts from the loss times the weight, so that gradients are
            this rank's addends as they come.
    """

    def __init__(self, extended: AllReduceExtended, shard: Shard) -> None:
        self._extended = extended
        self._rank = extended.engine.rank
        self.rows = tf.reshape(shard.rows, ())
        self.active = self.rows > 0
        self.applying = False
        self.loss_is_weighted = False
        self.data = shard.data
        global_rows = shard.global_rows
        if isinstance(global_rows, tuple):
            (global_rows,) = extended.reduce_sum([self.rows])
            with tf.control_dependencies([_end_of_data_unless(global_rows > 0)]):
                # Nothing of the user's step may run before the check.
                self.data = keras.tree.map_structure(lambda x: None if x is None else tf.identity(x), shard.data)
        self.weight = self.share = tf.cast(self.rows, tf.float64) / tf.cast(tf.reshape(global_rows, ()), tf.float64)

    @property
    def is_chief(self) -> bool:
        """Whether this is the rank whose value is taken where one rank's is."""
        return self._extended.engine.rank == 0

    def notes(self) -> dict[str, Any]:
        """Returns what has been noted while the step was traced so far."""
        return {name: copy.copy(value) for name, value in vars(self).items() if isinstance(value, bool | list)}

    def restore(self, notes: dict[str, Any]) -> None:
        """Forgets what was noted since, to trace again."""
        vars(self).update(notes)

    def sum_over_ranks(self, value: tf.Tensor) -> tf.Tensor:
        """Sums the active ranks' values.

        Collective: every rank must call this, in the same order.
        """
        (total,) = self._extended.reduce_sum([tf.where(self.active, value, tf.zeros_like(value))])
        return total

    def mean_over_ranks(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Averages tensors over the ranks, by their shares.

        Collective: every rank must call this, in the same order.
        """
        return self._extended.reduce_sum([self.weighted(value) for value in values])

    def weighted(self, value: tf.Tensor | tf.IndexedSlices) -> Any:
        """Multiplies a value by this rank's share; what an idle rank has counts nothing, NaN included."""
        weight = tf.cast(self.weight, value.dtype)
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(
                tf.math.multiply_no_nan(value.values, weight), value.indices, dense_shape=value.dense_shape
            )
        return tf.math.multiply_no_nan(value, weight)

    @contextlib.contextmanager
    def running(self, model: keras.Model) -> Iterator[None]:
        """Opens the step on a model: losses, metrics and seeds follow the ranks' shares while it is open."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._extended.in_step(self))
            stack.enter_context(internals.replaced_losses(model, lambda loss: GlobalLoss(loss, self)))
            stack.enter_context(scalars_weighted(flat_metrics(model), lambda: self.share))
            stack.enter_context(folded_seeds(internals.seed_generators(model), self._rank))
            yield


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
        sends_gradients: bool, whether it sums gradients over the ranks.
        local_gradients: list of tensors and `None`, this rank's own part of the gradients that an optimizer applies.
    """

    sends_gradients = True

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
            written = AssignedState(internals.state_variables(model), keep=not self.sends_gradients)
            self._state = stack.enter_context(written)
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
        self.local_gradients = grads
        rate = self._rate_of(innermost(optimizer))
        overwriting = [getattr(variable, "overwrite_with_gradient", False) for variable in variables]
        reduced = self._reduce(
            [None if overwrites else grad for grad, overwrites in zip(grads, overwriting, strict=True)],
            variables,
            rate,
            held=self._held(optimizer, variables),
            loss_is_weighted=self._take_weighted_loss(optimizer),
        )
        largest = self._largest(
            [grad if overwrites else None for grad, overwrites in zip(grads, overwriting, strict=True)]
        )
        grads = [grad if other is None else other for grad, other in zip(reduced, largest, strict=True)]
        self.applying = True
        try:
            with fused_sgd(rate.optimizer), rate.applied() if self._scaled else contextlib.nullcontext():
                yield grads
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

    def _held(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> list[tf.Variable] | None:
        """Returns where an optimizer adds up this rank's gradients until its update, if they travel with it."""
        if self._deferring is None or optimizer is not self._deferring:
            return None
        if not optimizer.built:
            optimizer.build(variables)
        return internals.accumulators(optimizer, variables)

    def _reduce(
        self,
        grads: list[Any],
        variables: Sequence[Any],
        rate: EffectiveRate,
        *,
        held: list[tf.Variable] | None,
        loss_is_weighted: bool,
    ) -> list[Any]:
        """Sends gradients, statistics and requests in one message; returns the global gradients."""
        state = self._state
        if state is None:
            raise NotSynchronizedError("A gradient was reduced outside of a running step.")
        given = [grad for grad in grads if grad is not None]
        of = [variable for variable, grad in zip(variables, grads, strict=True) if grad is not None]
        statistics = state.contributions(self)
        # As float32, like most gradients, they share a buffer.
        request = self._asked_for([rate])

        def addends(grads: Sequence[Any]) -> list[Any]:
            return self._zeros_if_idle(grads) if loss_is_weighted else [self.weighted(grad) for grad in grads]

        if held is None:
            reduced, (*merged, requests) = self._wire.sum(given, [*statistics, request], variables=of, prepare=addends)
        else:
            held = [each for each, grad in zip(held, grads, strict=True) if grad is not None]
            is_due = internals.is_update_due(rate.optimizer)
            reduced, (*merged, requests) = self._sum_if_due(is_due, addends(given), of, held, statistics, request)
        state.merge(merged)
        self._grant(requests, [rate])
        arrived = iter(reduced)
        return [None if grad is None else next(arrived) for grad in grads]

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

    def _largest(self, values: list[Any]) -> list[Any]:
        """Returns the elementwise maxima over the active ranks.

        The scales and histories of float8 layers come as gradients, but are the largest absolute values in a batch:
        that of all rows is the largest of the ranks'.
        """
        given = [tf.where(self.active, value, tf.zeros_like(value)) for value in values if value is not None]
        gathered = self._extended.engine.allgather([value[tf.newaxis] for value in given]) if given else []
        largest = iter([tf.reduce_max(value, axis=0) for value in gathered])
        return [None if value is None else next(largest) for value in values]

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


class LocalStep(TrainStep):
    """A step of this rank alone, on the mean of its own rows; now and then all ranks average their weights after it.

    Metrics count by the rank's share of the rows, as in other steps.

    Args:
        extended: the strategy's `AllReduceExtended`.
        shard: `Shard`, this rank's rows and the counts.
        averaging: `Averaging`.
        **others: what `TrainStep` is given.
    """

    sends_gradients = False

    def __init__(self, extended: AllReduceExtended, shard: Shard, *, averaging: Averaging, **others: Any) -> None:
        super().__init__(extended, shard, **others)
        self._averaging = averaging
        self.weight = tf.cast(self.active, tf.float64)

    @contextlib.contextmanager
    def running(self, model: keras.Model) -> Iterator[None]:
        """Opens the step on a model; at its end every rank has its own weights, or all have the same."""
        with self._extended.alone(), super().running(model):
            yield
        # Not before the data is there: at its end nothing of one more step may run, nor be counted.
        arrived = [leaf for leaf in tf.nest.flatten(self.data, expand_composites=True) if tf.is_tensor(leaf)]
        rates = [self._rate_of(innermost(optimizer)) for optimizer in optimizers_of(model)]
        with tf.control_dependencies(arrived):
            self._averaging.after_step(self._asked_for(rates), lambda requests: self._grant(requests, rates))

    def mean_over_ranks(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns this rank's values."""
        return list(values)

    def _merge(self, written: AssignedState) -> None:
        """Leaves statistics as this rank has written them, from rows that count."""
        written.put_back_unless(self.active)

    def _refuse_loss_scale(self) -> None:
        raise StrategyError(
            "Ranks that train by themselves would each have a scale of the loss of their own. Received: a "
            "LossScaleOptimizer, as mixed_float16 makes it, with sync_every. Expected gradients of one scale. Fix: "
            "mixed_bfloat16, or leave sync_every out."
        )

    def _reduce(
        self,
        grads: list[Any],
        variables: Sequence[Any],
        rate: EffectiveRate,
        *,
        held: list[tf.Variable] | None,
        loss_is_weighted: bool,
    ) -> list[Any]:
        """Returns this rank's own gradients."""
        given = [grad for grad in grads if grad is not None]
        own = iter(self._zeros_if_idle(given) if loss_is_weighted else [self.weighted(grad) for grad in given])
        return [None if grad is None else next(own) for grad in grads]


@contextlib.contextmanager
def folded_seeds(generators: Sequence[keras.random.SeedGenerator], rank: int) -> Iterator[None]:
    """Gives each rank its own random draws from equal seed states: the rank is folded into what `next` returns.

    Args:
        generators: the seed generators that are meant.
        rank: int, this rank; rank 0 draws what one process would.
    """
    offset = rank * 0x9E3779B1 % (2**31 - 1)  # far apart for neighbouring ranks

    def folded(generator: keras.random.SeedGenerator) -> Callable[..., tf.Tensor]:
        def following(ordered: bool = True) -> tf.Tensor:
            seed = type(generator).next(generator, ordered=ordered)
            return seed + tf.constant([offset, 0], seed.dtype)

        return following

    for generator in generators:
        generator.__dict__["next"] = folded(generator)
    try:
        yield
    finally:
        for generator in generators:
            generator.__dict__.pop("next", None)


def _end_of_data_unless(goes_on: tf.Tensor) -> tf.Tensor:
    """Ends the pass over the data, as the end of a dataset does, unless a `bool` scalar holds."""

    def stop() -> Any:
        raise StopIteration

    if tf.executing_eagerly():
        return tf.constant(True) if goes_on else stop()
    # A function that raises StopIteration gives OutOfRangeError, which Keras takes for the end of the data.
    return tf.cond(
        goes_on, lambda: tf.constant(True), lambda: tf.ensure_shape(tf.numpy_function(stop, [], tf.bool), ())
    )
