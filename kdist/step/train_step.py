"""A rank's part of a training step, and the list of the stages of its updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import keras

from kdist.data.batch import Shard
from kdist.gradients.reducer import GradientReducer
from kdist.keras_hooks.optimizers import optimizers_of
from kdist.learning_rate.effective_rate import EffectiveRate
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


class TrainStep(Step):
    """A step that updates weights: every optimizer applies reduced gradients.

    Args:
        extended: the strategy's `AllReduceExtended`.
        shard: `Shard`.
        traced_rows: `TracedRows` or `None`, see `Step`.
        written: `WrittenState` of the model.
        is_traced_alike: bool, see `Step`.
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
