"""The stage that sums gradients in parts, updates this rank's parts and gathers the weights."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.errors import StrategyError
from kdist.keras_hooks.layers.embedding import table_of
from kdist.keras_hooks.optimizers import (
    AVERAGES,
    TRAINED,
    UPDATE_AVERAGES,
    accumulates_as_keras,
    exclude_alike,
    is_elementwise,
    is_update_due,
    iterations,
    moving_averages,
)
from kdist.keras_hooks.patching import patched
from kdist.sharding.gradients import PartReducer
from kdist.sharding.norms import whole_norms
from kdist.sharding.optimizer import ShardedOptimizer, sharded
from kdist.sharding.part import parts_are_updated
from kdist.sharding.part_updates import PartUpdates
from kdist.sharding.table_update import TableReduce
from kdist.step.reduce import has_equal_indices
from kdist.step.step import Step
from kdist.step.update import Update
from kdist.strategies.update_chain import UpdateChain


class ShardedReduce(TableReduce):
    """Sums gradients so that each rank gets its parts; the later stages and Keras update these.

    Args:
        parts: `PartReducer`.
        *args: see `Reduce`.
    """

    def __init__(self, parts: PartReducer, *args: Any) -> None:
        super().__init__(*args)
        self._parts = parts

    def _reduce_and(self, update: Update, proceed: Callable[[], Any]) -> Any:
        _sharded(update.optimizer)  # refuses others
        return super()._reduce_and(update, proceed)

    def _has_parts(self, update: Update) -> bool:
        return True

    def _send_whole(self, update: Update, places: Sequence[int], exact: list[tf.Tensor]) -> tuple[list[Any], list[Any]]:
        parts = _sharded(update.optimizer).parts_of([update.variables[place] for place in places])
        gradients = [update.gradients[place] for place in places]
        return self._parts.sum(gradients, parts, update.terms, exact, functools.partial(has_equal_indices, self._step))

    def _update(self, update: Update, proceed: Callable[[], Any]) -> Any:
        sharded_optimizer = _sharded(update.optimizer)
        weights, optimizer = update.variables, sharded_optimizer.optimizer
        update.variables = sharded_optimizer.part_variables(weights)
        # Again: a script may exclude weights after the optimizer is built, as after `load_model`.
        exclude_alike(optimizer, list(zip(weights, update.variables, strict=True)))
        updated = [each for each, gradient in zip(weights, update.gradients, strict=True) if gradient is not None]
        has_averages = bool(optimizer.use_ema)  # which Keras makes of all weights, after their updates
        if has_averages:
            for part in sharded_optimizer.parts.values():
                part.load()
        sets_weights = _sets_weights(update.optimizer)
        count = tf.identity(iterations(optimizer).value)
        are_parts = [True] * len(updated)
        with (
            parts_are_updated(),
            _in_turn(self._step, optimizer, None if has_averages else sharded_optimizer.updates_of(updated)),
            whole_norms(update.optimizer, are_parts, self._step.engine),
            patched(optimizer, TRAINED, sharded_optimizer.part_variables()),
            _own_weights_alone(optimizer),
        ):
            result = proceed()
        if has_averages and sets_weights is None:
            sharded_optimizer.gather()
        elif has_averages:
            tf.cond(sets_weights, sharded_optimizer.gather, sharded_optimizer.free)
        update.variables = weights
        constrained = [
            weight for weight in updated if table_of(weight) is None and getattr(weight, "constraint", None) is not None
        ]

        def constrain() -> None:
            for weight in constrained:
                weight.assign(weight.constraint(weight))

        if constrained:  # unless a loss scale has skipped the update
            tf.cond(tf.not_equal(iterations(optimizer).value, count), constrain, lambda: None)
        return result


def _sharded(optimizer: keras.optimizers.Optimizer) -> ShardedOptimizer:
    """Returns what updates parts of the weights of an optimizer; raises for one that is made without it."""
    found = sharded(optimizer)
    if found is None:
        raise StrategyError(
            f'shard="optimizer" does not support an optimizer that was made outside of the scope. Received: '
            f"{type(optimizer).__name__}, which is built. Expected one that is made in kdist.scope(). Fix: "
            "move the line that makes it into the scope."
        )
    return found


@contextlib.contextmanager
def _in_turn(step: Step, optimizer: keras.optimizers.Optimizer, updates: PartUpdates | None) -> Iterator[None]:
    """Makes an optimizer update weights one after the other; without `PartUpdates` all parts are loaded."""
    decaying = contextlib.nullcontext() if updates is None else updates.decaying_in_turn(optimizer)
    with step.updating(updates or UpdateChain()), decaying:
        yield


def _sets_weights(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns whether this step changes weights, a `bool` scalar; `None` if all steps may."""
    if not accumulates_as_keras(optimizer) or (optimizer.use_ema and optimizer.ema_overwrite_frequency):
        return None
    return is_update_due(optimizer)


@contextlib.contextmanager
def _own_weights_alone(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Makes an optimizer leave out the weights that other ranks update, and their moving averages."""
    if is_elementwise(optimizer):
        yield
        return
    update_step = optimizer.update_step

    def update(gradient: Any, variable: Any, learning_rate: Any) -> None:
        if math.prod(variable.shape):
            update_step(gradient, variable, learning_rate)

    average = getattr(optimizer, UPDATE_AVERAGES)

    def update_averages(variables: Any) -> None:
        if optimizer.use_ema:  # Keras takes what has no rows for a bias, and leaves out `None`
            averages = [each for _, each in moving_averages(optimizer)]
            own = [None if each is None or not math.prod(each.shape) else each for each in averages]
            with patched(optimizer, AVERAGES, own):
                average(variables)

    with patched(optimizer, "update_step", update), patched(optimizer, UPDATE_AVERAGES, update_averages):
        yield
