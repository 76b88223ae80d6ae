"""A training step of local SGD (`sync_every`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.data.batch import Shard
from kdist.keras_hooks.optimizers import innermost, optimizers_of
from kdist.step.buffers import BufferSync
from kdist.step.local_sgd import LocalSGD
from kdist.step.reduce import KeepLocal, Reduce
from kdist.step.train_step import TrainStep
from kdist.step.update import UpdatePipeline
from kdist.strategies.all_reduce import AllReduceExtended


class LocalSGDStep(TrainStep):
    """A step on the mean of this rank's rows; the ranks average their weights after some of these steps.

    Metrics are weighted by the rank's share of the rows, as in other steps.
    """

    has_joint_metrics = False

    def __init__(self, extended: AllReduceExtended, shard: Shard, *, local_sgd: LocalSGD, **kwargs: Any) -> None:
        super().__init__(extended, shard, **kwargs)
        self._local_sgd = local_sgd
        self.weight = tf.cast(self.active, tf.float64)

    @contextlib.contextmanager
    def running(self, model: keras.Model) -> Iterator[UpdatePipeline]:
        """Opens the step on a model; the ranks may average their weights at its end."""
        with self._extended.no_sync(), super().running(model) as pipeline:
            yield pipeline
        rates = [self._rate_of(innermost(optimizer)) for optimizer in optimizers_of(model)]
        with tf.control_dependencies(self.data_tensors):  # the end of the data is no step
            self._local_sgd.after_step(self._votes.vector(rates), lambda counts: self._votes.apply(counts, rates))

    def mean_over_ranks(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns this rank's values, unreduced."""
        return list(values)

    def _reduction(self, buffers: BufferSync) -> Reduce:
        return KeepLocal(self, self._reducer, buffers, self._votes, self._rate_of)

    def _merge(self, buffers: BufferSync) -> None:
        """Keeps this rank's statistics, unless it had no rows."""
        buffers.restore_unless(self.active)
