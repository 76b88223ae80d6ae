"""A training step that a rank makes by itself, for `sync_every`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.data.shard import Shard
from kdist.errors import StrategyError
from kdist.strategies.all_reduce import AllReduceExtended
from kdist.training.assigned_state import AssignedState
from kdist.training.averaging import Averaging
from kdist.training.optimizers import innermost, optimizers_of
from kdist.training.train_step import TrainStep


class LocalStep(TrainStep):
    """A step of this rank alone, on the mean of its own rows; now and then all ranks average their weights after it.

    Metrics count by the rank's share of the rows, as in other steps.

    Args:
        extended: the strategy's `AllReduceExtended`.
        shard: `Shard`, this rank's rows and the counts.
        averaging: `Averaging`.
        **others: what `TrainStep` is given.
    """

    def __init__(self, extended: AllReduceExtended, shard: Shard, *, averaging: Averaging, **others: Any) -> None:
        super().__init__(extended, shard, **others)
        self._averaging = averaging
        self.weight = tf.cast(self.active, tf.float64)

    @contextlib.contextmanager
    def running(self, model: keras.Model) -> Iterator[None]:
        """Opens the step on a model; at its end every rank has its own weights, or all have the same."""
        with self._extended.alone(), super().running(model):
            yield
        rates = [self._rate_of(innermost(optimizer)) for optimizer in optimizers_of(model)]
        with tf.control_dependencies(self.arrived):  # at the end of data nothing of one more step may be counted
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

    def _sum(
        self, grads: list[Any], variables: list[Any], *, prepare: Callable[[Sequence[Any]], list[Any]], **others: Any
    ) -> list[Any]:
        """Returns this rank's own gradients."""
        return prepare(grads)
