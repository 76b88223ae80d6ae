"""A rank's part of a training, test or predict step, traced or run eagerly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.data.batch import Shard
from kdist.data.graphs.end_of_data import end_of_data_unless
from kdist.engines.engine import Engine
from kdist.keras_hooks.layers.batch_normalization import synchronized_moments
from kdist.keras_hooks.losses import replaced_losses, scaled_activity_losses
from kdist.keras_hooks.metrics import wrapped_updates
from kdist.keras_hooks.random_seeds import folded_seeds
from kdist.keras_hooks.trainer import computes_custom_loss, seed_generators
from kdist.reports.own_statistics import tell_of_own_statistics
from kdist.state.assignments import Assignments
from kdist.state.random_state import folded_draws
from kdist.state.written import WrittenState
from kdist.step.buffers import BufferSync
from kdist.step.losses.custom_losses import CustomLosses
from kdist.step.losses.custom_metrics import CustomMetrics
from kdist.step.losses.global_loss import GlobalLoss
from kdist.step.losses.step_rows import StepRows
from kdist.step.losses.weighted_metrics import WeightedMetrics
from kdist.step.step_function import TracedRows
from kdist.strategies.all_reduce import AllReduceExtended
from kdist.strategies.global_batch import GlobalBatch
from kdist.strategies.update_chain import UpdateChain


class Step:
    """A rank's part of a global step: what its layers write beside weights is equal on all ranks at its end.

    The global loss is the sum over the ranks of `weight` times the rank's loss; the weight is the rank's share of the
    global batch's rows. A rank without data runs one real row at weight 0.

    Args:
        extended: the strategy's `AllReduceExtended`.
        shard: `Shard`. Empty `global_rows` are summed over the ranks; a step in which no rank has rows ends the pass
            over the data on all ranks.
        traced_rows: `TracedRows` or `None`, by which the step can be traced again without the number of its rows.
        written: `WrittenState` of the model.
        is_traced_alike: bool, whether the shapes of the data are the same on all ranks while the step is traced.

    Attributes:
        rows: `int64` scalar, the number of this rank's rows; 0 on a rank without data.
        global_rows: `int64` scalar, the rows of all ranks.
        weights: list, the trainable variables of the model on which the step is open.
        own_rows: `StepRows`.
        custom_losses: `CustomLosses`.
        data, share, weight, active, applying, loss_is_weighted: see `OpenStep`.
    """

    kind = "forward"
    has_joint_metrics = True  # local SGD counts by rank, and sums the states of all metrics

    def __init__(
        self,
        extended: AllReduceExtended,
        shard: Shard,
        *,
        traced_rows: TracedRows | None = None,
        written: WrittenState,
        is_traced_alike: bool,
    ) -> None:
        self._extended = extended
        self._rank = extended.engine.rank
        self.rows = tf.reshape(shard.rows, ())
        self.active = self.rows > 0
        self.applying = False
        self.weights: list[Any] = []
        self.loss_is_weighted = False
        self.data = shard.data
        global_rows = shard.global_rows
        if isinstance(global_rows, tuple):
            (global_rows,) = extended.reduce_sum([self.rows])
            with tf.control_dependencies([end_of_data_unless(global_rows > 0)]):
                # No part of the user's step may run before the check.
                self.data = keras.tree.map_structure(lambda x: None if x is None else tf.identity(x), shard.data)
        self.global_rows = tf.cast(tf.reshape(global_rows, ()), tf.int64)
        self.weight = self.share = tf.cast(self.rows, tf.float64) / tf.cast(self.global_rows, tf.float64)
        self.own_rows = StepRows(self)
        self.custom_losses = CustomLosses(self, self.own_rows)
        self._traced_rows = traced_rows
        self._written = written
        self._is_traced_alike = is_traced_alike
        self._assignments: Assignments | None = None

    @property
    def data_tensors(self) -> list[tf.Tensor]:
        """The tensors of the data: what depends on them does not run at the end of data of unknown length."""
        return [leaf for leaf in tf.nest.flatten(self.data, expand_composites=True) if tf.is_tensor(leaf)]

    @property
    def engine(self) -> Engine:
        """See `OpenStep.engine`."""
        return self._extended.engine

    def updating(self, updates: UpdateChain | None) -> contextlib.AbstractContextManager[None]:
        """See `AllReduceExtended.updating`."""
        return self._extended.updating(updates)

    def may_differ(self, value: tf.Tensor) -> bool:
        """See `OpenStep.may_differ`."""
        return self._assignments is None or self._assignments.may_differ(value)

    def depends_on_rows(self, value: tf.Tensor) -> bool:
        """See `OpenStep.depends_on_rows`."""
        return self._assignments is None or self._assignments.depends_on_rows(value)

    def is_traced_again(self, *, knows_number: bool) -> bool:
        """See `TracedRows.is_traced_again`."""
        return self._traced_rows is not None and self._traced_rows.is_traced_again(knows_number=knows_number)

    def is_asked_again(self) -> bool:
        """See `TracedRows.is_asked`."""
        return self._traced_rows is not None and self._traced_rows.is_asked

    def mean_over_ranks(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Averages tensors over the ranks, weighted by their shares.

        Collective: every rank must call this, in the same order.
        """
        return self.engine.allreduce([self.weighted(value) for value in values])

    def weighted(self, value: tf.Tensor | tf.IndexedSlices) -> Any:
        """See `OpenStep.weighted`."""
        weight = tf.cast(self.weight, value.dtype)
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(
                tf.math.multiply_no_nan(value.values, weight), value.indices, dense_shape=value.dense_shape
            )
        return tf.math.multiply_no_nan(value, weight)

    def per_share(self, value: tf.Tensor) -> tf.Tensor:
        """See `OpenStep.per_share`."""
        mean = tf.math.divide_no_nan(value, tf.cast(self.weight, value.dtype))
        self.own_rows.note_mean(mean)
        return mean

    @contextlib.contextmanager
    def opened(self, model: keras.Model) -> Iterator[Any]:
        """Opens the step, and lets its operations wait for its data; yields the update pipeline of a training step.

        At the end of data of unknown length no part of another step may run, not even what needs no data: the count of
        iterations, weight decay.
        """
        with self.running(model) as pipeline, tf.control_dependencies(self.data_tensors):
            yield pipeline

    @contextlib.contextmanager
    def running(self, model: keras.Model) -> Iterator[Any]:
        """Opens the step on a model: losses, metrics and seeds use the ranks' shares while it is open.

        What it has written is merged at its end. A step may be opened again after a trace that failed.
        """
        self.applying = self.loss_is_weighted = False
        self.weights = model.trainable_variables
        has_other_rows = computes_custom_loss(model)
        batch = GlobalBatch(self, has_other_rows=has_other_rows)

        def global_loss(loss: Any) -> Any:
            return self.custom_losses.compiled(loss, GlobalLoss(loss, self, batch, has_other_rows=has_other_rows))

        metrics = CustomMetrics(self, self.custom_losses, batch)
        weighted = WeightedMetrics(model, self, self.rows, self.custom_losses, batch, joint=self.has_joint_metrics)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._extended.in_step(self))
            stack.enter_context(replaced_losses(model, global_loss))
            stack.enter_context(scaled_activity_losses(model, self.per_share))
            stack.enter_context(weighted.opened())
            stack.enter_context(self.custom_losses.opened(model, lambda who, rows: batch.call(who, list, rows)))
            if self.has_joint_metrics:
                stack.enter_context(
                    wrapped_updates(
                        model,
                        metrics.update_of_all,
                        metrics.update_of_sums,
                        call_rows=None if has_other_rows else batch.call,
                    )
                )
            is_graph = not tf.executing_eagerly()

            def is_alike() -> bool:  # what a variable that the step makes begins with, too
                return batch.is_in_call or (is_graph and tf.executing_eagerly())

            stack.enter_context(folded_seeds(seed_generators(model), self._rank, is_alike))
            stack.enter_context(folded_draws(self._rank, is_alike, self._extended.next_seed))
            stack.enter_context(synchronized_moments(tell_of_own_statistics, self.own_rows.note_statistics))
            assignments = stack.enter_context(self._recording(model))
            buffers = BufferSync(self, assignments)
            pipeline = stack.enter_context(self._updating(model, buffers))
            self._assignments = assignments
            yield pipeline
            self._merge(buffers)

    def _recording(self, model: keras.Model) -> Assignments:
        return Assignments(
            model,
            self.engine,
            [*self.data_tensors, self.rows, self.share, self.weight, self.active],
            self._written,
            self.kind,
            is_traced_alike=self._is_traced_alike,
            is_gradient=self.custom_losses.is_gradient,
            of_all_ranks=self.custom_losses.of_state,
            is_traced_again=self.is_asked_again,
        )

    @contextlib.contextmanager
    def _updating(self, model: keras.Model, buffers: BufferSync) -> Iterator[Any]:
        yield None

    def _merge(self, buffers: BufferSync) -> None:
        buffers.merge_the_rest()
