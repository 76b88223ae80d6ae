"""The training session of one model that several ranks train together."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from kdist.errors import ScopeError
from kdist.gradients.reducer import GradientReducer, make_compression
from kdist.keras_hooks.optimizers import count_ended_step, innermost
from kdist.keras_hooks.trainer import plain_compiles
from kdist.learning_rate.effective_rate import EffectiveRate
from kdist.learning_rate.effective_rates import EffectiveRates
from kdist.learning_rate.rate_scale import scaled_rate
from kdist.sharding.gradients import PartReducer
from kdist.sharding.table import part_variables_of
from kdist.sharding.table_update import TableReduce
from kdist.sharding.update import ShardedReduce
from kdist.state.comparison import refuse_differences
from kdist.state.part import StatePart
from kdist.state.session import TrainingSession
from kdist.state.slots import SlotState
from kdist.state.variables import ModelState
from kdist.state.written import WrittenState
from kdist.step.local_sgd import KeepLocal, LocalSGD
from kdist.step.reduce import Reduce, ReduceWhenDue
from kdist.step.update import OptimizerUpdate
from kdist.strategies.accumulation import LocalAccumulation
from kdist.strategies.all_reduce import AllReduceStrategy
from kdist.strategies.settings import Settings
from kdist.trainer.common_state import CommonState
from kdist.trainer.feeding.data_state import ShardedData
from kdist.trainer.feeding.feed import Feed

logger = logging.getLogger("kdist")


class ReplicatedSession(TrainingSession):
    """The state of one model's training that its methods, steps and callbacks share.

    Attributes:
        feed: `Feed`, the data of the calls.
        effective_rates: `EffectiveRates`, the learning rates of updates.
        reducer: `GradientReducer`.
        accumulation: `LocalAccumulation`, for `gradient_accumulation_steps`.
        local_sgd: `LocalSGD` or `None`, for `sync_every`.
        options: `AllReduce`, those of the strategy.
        writes: bool, whether this rank saves models in callbacks.
        running_methods: list of str, the methods that run, the outermost first.
        written: `WrittenState`, what steps write beside weights.
        common_state: `CommonState`, the state that is the same on all ranks.
    """

    has_global_logs = True
    begins_backups = True
    runs_update_pipeline = True

    def __init__(self, model: keras.Model, strategy: AllReduceStrategy, settings: Settings) -> None:
        super().__init__(model, strategy.engine)
        self.strategy = strategy
        self.settings = settings
        self.running_methods: list[str] = []
        self.written = WrittenState(self.engine)
        self.writes = self.engine.rank == 0
        self.has_loaded_state = False  # from a file of weights, since the ranks were made equal
        self.feed = Feed(model, strategy, settings, begin_pass=self._begin_pass, end_pass=self._end_pass)
        self.effective_rates = EffectiveRates(
            model, scale_lr=settings.scale_lr, batches_per_step=settings.batches_per_step(self.engine.size)
        )
        self.common_state = CommonState(
            model, self.engine, self.parts, self.effective_rates, self.written, settings.options.shard_embeddings
        )
        self.accumulation = LocalAccumulation(model, self.engine)
        self.options = options = settings.options
        self.reducer = GradientReducer(
            self.engine,
            compression=make_compression(
                options.compression, powersgd_rank=options.powersgd_rank, topk_ratio=options.topk_ratio
            ),
            bucket_mb=options.bucket_mb,
            sparse_as_dense=options.sparse_as_dense,
        )
        self.parts_reducer: PartReducer | None = None
        if options.shard:
            self.parts_reducer = PartReducer(
                self.engine,
                compression=options.compression,
                bucket_mb=options.bucket_mb,
                sparse_as_dense=options.sparse_as_dense,
            )
        self.local_sgd: LocalSGD | None = None
        if options.sync_every > 1:
            self.local_sgd = LocalSGD(
                model,
                self.engine,
                self.written,
                every=options.sync_every,
                learning_rate=options.outer_learning_rate,
                momentum=options.outer_momentum,
                bucket_mb=options.bucket_mb,
            )
        self._reported: list[Settings] = []
        self._updates: list[OptimizerUpdate] = []  # of the training step that was traced last

    @contextlib.contextmanager
    def running(self, method: str) -> Iterator[None]:
        """A context that is open while a call runs."""
        self.running_methods.append(method)
        self.strategy.running.append(self)
        try:
            yield
        finally:
            self.strategy.running.pop()
            self.running_methods.pop()

    def of_shared_weights(self) -> list[ReplicatedSession]:
        """Returns this session, and those of running methods whose models share weights with this one's."""
        own = {id(each) for each in self.model.weights}
        shared = [each for each in self.strategy.running if any(id(weight) in own for weight in each.model.weights)]
        return [self, *(each for each in shared if each is not self)]

    def new_updates(self) -> list[OptimizerUpdate]:
        """Returns an empty list for the updates of a training step that is traced, or runs eagerly."""
        self._updates = []
        return self._updates

    def warn_of_other_settings(self) -> None:
        """Warns once if the open scope has other settings than the model's scope."""
        now = self.strategy.settings
        if now is None or not self.settings.unlike(now) or now in self._reported or not self.writes:
            return
        self._reported.append(now)
        logger.warning(
            "the model keeps the settings of the scope it was made in: %s. Fix: make it, or load it, in this scope",
            self.settings.unlike(now),
        )

    def reduction(self, *, is_fit: bool) -> Callable[..., Reduce]:
        """Returns what makes the reduce stage, in `fit` or in `train_on_batch`."""
        if self.local_sgd is not None and is_fit:
            return KeepLocal
        if self.parts_reducer is not None:
            return functools.partial(ShardedReduce, self.parts_reducer)
        if self.options.shard_embeddings is not None:
            return TableReduce
        return ReduceWhenDue if is_fit and self.accumulation.optimizer is not None else Reduce

    # State.

    @property
    def slots(self) -> SlotState:
        """The slots beside the model's variables: residuals of compression, or the velocities of local SGD."""
        return SlotState(self.model, self.local_sgd or self.reducer)

    def parts(self) -> list[StatePart]:
        """See `TrainingSession.parts`."""
        return [self.slots, ModelState(self.model), self.effective_rates]

    def data(self, epoch_step: int = 0) -> ShardedData:
        """Returns the position in the sharded data; see `TrainingSession.data`."""
        return ShardedData(self.feed.training, self.feed.orders, epoch_step)

    def is_last_step(self, epoch_step: int, params: Mapping[str, Any]) -> bool:
        """See `TrainingSession.is_last_step`."""
        return self.feed.training.is_last(epoch_step)

    @property
    def draws_in_background(self) -> bool:
        """See `TrainingSession.draws_in_background`."""
        return self.feed.draws_in_background

    def rates(self) -> list[EffectiveRate]:
        """Returns the effective rates of the model's optimizers."""
        return self.effective_rates.all()

    def rate_of(self, optimizer: keras.optimizers.Optimizer) -> EffectiveRate:
        """Returns the effective rate of an innermost optimizer."""
        return self.effective_rates.get(optimizer)

    def pending_variables(self) -> list[Any]:
        """See `TrainingSession.pending_variables`."""
        return self.common_state.pending_variables()

    def weights_are_pending(self) -> bool:
        """See `TrainingSession.weights_are_pending`."""
        votes = self.votes
        return any(self.engine.gather_objects(votes.is_cast("weights") or "weights" in votes.agreed))

    def check_step_extension(self, who: str, *, joint: bool = False) -> None:
        """See `TrainingSession.check_step_extension`."""
        if joint and (option := self.options.in_parts):
            raise ScopeError(
                f"{who} does not support {option}. Received: {who} with {option}. Expected whole gradients on each "
                f"rank. Fix: remove {who}, or use kdist.AllReduce() without {option}."
            )
        if joint and self.local_sgd is not None:
            raise ScopeError(
                f"{who} does not support sync_every. Received: {who} with sync_every="
                f"{self.settings.options.sync_every}. Expected gradients that are summed in each step. Fix: remove "
                f"{who}, or sync_every."
            )

    def broadcast_state(self, method: str, learning_rates: Mapping[str, float] | None = None) -> None:
        """Does what `CommonState.begin` does.

        Collective: every rank must call this, in the same order.
        """
        has_loaded = self.votes.is_cast("weights")
        self.common_state.begin(
            method, learning_rates, has_loaded=has_loaded, has_loaded_state=has_loaded and self.has_loaded_state
        )
        self.votes.withdraw("weights")
        self.has_loaded_state = False

    def make_weights_equal(self) -> None:
        """Does what `CommonState.make_weights_equal` does, unless weights differ until the next average.

        Collective: every rank must call this, in the same order.
        """
        if self.local_sgd is None or not self.local_sgd.is_open:
            self.common_state.make_weights_equal()

    # Agreement.

    def agree(self, rates: Sequence[EffectiveRate] = ()) -> None:
        """Exchanges votes at once, and stops training or broadcasts loaded weights on all ranks.

        Collective: every rank must call this, in the same order.

        Args:
            rates: sequence of `EffectiveRate`, of which changes are exchanged, too.
        """
        self._cast_stop()
        changes = self.votes.agree([rate.agreed.local_change() for rate in rates])
        for rate, change in zip(rates, changes, strict=True):
            rate.agreed.apply_change(change)
        self._follow_votes()

    def _follow_votes(self) -> None:
        if "stop" in self.votes.agreed:
            self.model.stop_training = True
        if "weights" in self.votes.agreed:
            self.broadcast_loaded_weights()

    def agree_to_stop(self) -> bool:
        """Exchanges votes at once, and returns whether any rank has asked to stop training.

        Collective: every rank must call this, in the same order.
        """
        self._cast_stop()
        self.votes.agree()
        return "stop" in self.votes.agreed

    def _cast_stop(self) -> None:
        if getattr(self.model, "stop_training", False):  # a model that is not compiled has none
            self.votes.cast("stop")

    def broadcast_loaded_weights(self) -> None:
        """Broadcasts the state of the first rank that has loaded weights; if all have, only that which differs.

        With local SGD, ranks that have all loaded or set weights between two averages take the mean.

        Collective: every rank must call this, in the same order.
        """
        gathered = self.engine.gather_objects([self.votes.is_cast("weights"), self.common_state.loads()])
        has_loaded, files = (list(each) for each in zip(*gathered, strict=True))
        refuse_differences("the weights loaded by a callback", files)  # parts cannot be broadcast
        self.votes.withdraw("weights")
        self.has_loaded_state = False
        local_sgd = self.local_sgd if self.local_sgd is not None and self.local_sgd.is_open else None
        if local_sgd is not None and all(has_loaded):
            local_sgd.average_loaded()
            return
        within_a_pass = self.accumulation.is_open
        if within_a_pass:
            self.accumulation.end()
        if all(has_loaded):  # as they should, and the same: a checksum is less to send
            self.common_state.make_loaded_equal()
        else:
            self.common_state.broadcast(root=has_loaded.index(True) if any(has_loaded) else 0)
        if within_a_pass:
            self.accumulation.begin()
        if local_sgd is not None:
            local_sgd.begin()

    def synchronize(self) -> None:
        """See `TrainingSession.synchronize`."""
        if self.local_sgd is not None and self.local_sgd.is_open:
            self.agree()  # a rank may have loaded weights
            self.local_sgd.average_all()

    # Passes over data.

    def _begin_pass(self) -> None:
        is_of_fit = self.running_methods[-1] == "fit"
        if self.running_methods[-1] != "predict":
            self.metrics.begin(all_are_summed=is_of_fit and self.local_sgd is not None, is_of_fit=is_of_fit)
        if not is_of_fit:
            return
        if self.accumulation.optimizer is not None:
            self.agree()  # broadcasts loaded weights before the sums differ
            self.accumulation.begin()
        if self.local_sgd is not None:
            self.agree()
            self.local_sgd.begin()

    def _end_pass(self) -> None:
        if self.running_methods[-1] == "predict":
            return
        all_are_summed = "fit" in self.running_methods and self.local_sgd is not None
        if self.running_methods[-1] != "fit":
            self.metrics.end(all_are_summed=all_are_summed)
        else:
            self._cast_stop()
            self.metrics.end(all_are_summed=all_are_summed, allreduce=self.votes.agree)
            if self.counts_ended_step:
                for optimizer, variables in self._updates:
                    with scaled_rate(innermost(optimizer), self.rate_of(innermost(optimizer))):
                        count_ended_step(optimizer, part_variables_of(variables))
            self.accumulation.end()
            self._follow_votes()
            self.votes.withdraw("stop")  # from here on the flag says it, which a callback may set back
            if self.local_sgd is not None:
                self.local_sgd.end()

    @property
    def counts_ended_step(self) -> bool:
        """Whether optimizers count the step that has found the end of the data, as plain Keras' graphs do."""
        return self.feed.training.ended_within_a_graph and not plain_compiles(self.model)

    def end_interrupted_pass(self) -> None:
        """Makes the ranks equal again if the last `fit` raised within a pass.

        Collective: every rank must call this, in the same order.
        """
        if self.accumulation.is_open and not self.running_methods:
            self.accumulation.end()
        if self.local_sgd is not None and self.local_sgd.is_open and not self.running_methods:
            self.agree()
            self.local_sgd.end()
