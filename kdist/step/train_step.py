"""A rank's part of a training step, and the list of the stages of its updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.data.batch import Shard
from kdist.gradients.reducer import GradientReducer
from kdist.keras_hooks.layers.batch_normalization import synchronized_moments
from kdist.keras_hooks.optimizers import optimizers_of
from kdist.learning_rate.effective_rate import EffectiveRate
from kdist.reports.own_statistics import tell_of_own_statistics
from kdist.state.votes import Votes
from kdist.state.written import WrittenState
from kdist.step.buffers import BufferSync
from kdist.step.fused_sgd import FusedSGD
from kdist.step.reduce import Reduce, VoteMessage, WeightGradients
from kdist.step.scale_rate import ScaleRate, UnscaledRate
from kdist.step.step import Step
from kdist.step.step_function import TracedRows
from kdist.step.update import OptimizerUpdate, Stage, UpdatePipeline
from kdist.strategies.all_reduce import AllReduceExtended


class ForwardStep(Step):
    """A step that updates no weights: what its layers write is equal on all ranks at its end.

    Args:
        extended: the strategy's `AllReduceExtended`.
        shard: `Shard`.
        traced_rows: `TracedRows` or `None`, see `Step`.
        written: `WrittenState` of the model.
        is_traced_alike: bool, whether the shapes of the data are the same on all ranks while the step is traced.
    """

    kind = "forward"

    def __init__(
        self,
        extended: AllReduceExtended,
        shard: Shard,
        *,
        traced_rows: TracedRows | None = None,
        written: WrittenState,
        is_traced_alike: bool,
    ) -> None:
        super().__init__(extended, shard, traced_rows)
        self._written = written
        self._is_traced_alike = is_traced_alike
        self._buffers: BufferSync | None = None

    def may_differ(self, value: tf.Tensor) -> bool:
        """See `OpenStep.may_differ`."""
        return self._buffers is None or self._buffers.may_differ(value)

    def depends_on_rows(self, value: tf.Tensor) -> bool:
        """See `OpenStep.depends_on_rows`."""
        return self._buffers is None or self._buffers.depends_on_rows(value)

    @contextlib.contextmanager
    def running(self, model: keras.Model) -> Iterator[Any]:
        """Opens the step on a model; what it has written is merged at its end."""
        with (
            super().running(model),
            synchronized_moments(tell_of_own_statistics, self.own_rows.note_statistics),
            BufferSync(model, self, self._written, self.kind, is_traced_alike=self._is_traced_alike) as buffers,
            self._updating(model, buffers) as pipeline,
        ):
            self._buffers = buffers
            yield pipeline
            self._merge(buffers)

    @contextlib.contextmanager
    def _updating(self, model: keras.Model, buffers: BufferSync) -> Iterator[Any]:
        yield None

    def _merge(self, buffers: BufferSync) -> None:
        buffers.merge_the_rest()


class TrainStep(ForwardStep):
    """A step that updates weights: every optimizer applies reduced gradients.

    Args:
        extended: the strategy's `AllReduceExtended`.
        shard: `Shard`.
        traced_rows: `TracedRows` or `None`, see `Step`.
        written: `WrittenState` of the model.
        is_traced_alike: bool, see `ForwardStep`.
        reducer: `GradientReducer`.
        rate_of: callable that returns the `EffectiveRate` of an innermost optimizer.
        scaled: bool, whether updates use the scaled rate; not in `train_on_batch`, which splits the user's batch.
        votes: `Votes` of this rank's callbacks.
        reduction: callable that returns the `Reduce` stage; its arguments are those of `Reduce`.
        extensions: sequence of `Stage`, those of callbacks.
        updates: list, to which each unconditional update adds its optimizer and its variables.
    """

    kind = "train"

    def __init__(
        self,
        extended: AllReduceExtended,
        shard: Shard,
        *,
        traced_rows: TracedRows | None = None,
        written: WrittenState,
        is_traced_alike: bool,
        reducer: GradientReducer,
        rate_of: Callable[[keras.optimizers.Optimizer], EffectiveRate],
        scaled: bool,
        votes: Votes,
        reduction: Callable[..., Reduce],
        extensions: Sequence[Stage] = (),
        updates: list[OptimizerUpdate],
    ) -> None:
        super().__init__(extended, shard, traced_rows=traced_rows, written=written, is_traced_alike=is_traced_alike)
        self._reducer = reducer
        self._rate_of = rate_of
        self._scaled = scaled
        self._votes = VoteMessage(self, votes)
        self._reduction = reduction
        self._extensions = extensions
        self._updates = updates

    def stages(self, buffers: BufferSync) -> list[Stage]:
        """Returns the stages of each update, in the order of `PHASES`; those of callbacks are sorted in."""
        return [
            WeightGradients(self),
            self._reduction(self, self._reducer, buffers, self._votes, self._rate_of),
            (ScaleRate if self._scaled else UnscaledRate)(self._rate_of),
            FusedSGD(),
            *self._extensions,
        ]

    @contextlib.contextmanager
    def _updating(self, model: keras.Model, buffers: BufferSync) -> Iterator[UpdatePipeline]:
        pipeline = UpdatePipeline(self.stages(buffers), self, self._updates)
        with pipeline.opened(optimizers_of(model)):
            yield pipeline
