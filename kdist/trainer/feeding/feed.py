"""The data of a replicated model's methods, in orders that are equal on all ranks."""

from __future__ import annotations

import contextlib
import functools
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras

from kdist.data.input_checks import check_inputs
from kdist.data.make_source import has_fixed_shapes, holds_random_state, make_source
from kdist.data.source import Source
from kdist.errors import MismatchError, ScopeError
from kdist.keras_hooks.signatures import CLASS_WEIGHT, comparable
from kdist.reports.log import once
from kdist.state.comparison import refuse_differences
from kdist.state.random_state import input_seed
from kdist.strategies.all_reduce import AllReduceStrategy
from kdist.strategies.settings import Settings
from kdist.trainer.feeding.epoch_iterator import ShardedEpochIterator
from kdist.trainer.feeding.orders_by_hand import OrdersByHand
from kdist.trainer.feeding.source_adapter import SourceAdapter


class Feed:
    """Makes this rank's shards of the data of each call, and synchronises the random states that the data uses.

    Attributes:
        orders: `OrdersByHand` of the running `fit`.
        widths_differ: bool, whether batches in the last `predict` may differ in other dimensions than the first.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: AllReduceStrategy,
        settings: Settings,
        *,
        begin_pass: Callable[[], None],
        end_pass: Callable[[], None],
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._engine = strategy.engine
        self._settings = settings
        self._begin_pass = begin_pass
        self._end_pass = end_pass
        self._training: ShardedEpochIterator | None = None
        self._holds_random_state = False
        self._random_state = ""  # at the beginning of the outermost call, before a generator draws
        self._num_sources = 0
        self.widths_differ = False
        self.orders = OrdersByHand({})

    @contextlib.contextmanager
    def outermost_call(self) -> Iterator[None]:
        """A context that is open while the outermost call runs."""
        try:
            yield
        finally:
            if self._holds_random_state:
                self._holds_random_state = False
                self._strategy.draws.num_holding -= 1

    @contextlib.contextmanager
    def running_fit(self, arguments: dict[str, Any]) -> Iterator[None]:
        """A context that is open while `fit` runs, which may call Keras' `fit` several times.

        Args:
            arguments: dict, its arguments by name.
        """
        outer = self._training, self.orders
        self._training, self.orders = None, OrdersByHand(arguments)
        try:
            yield
        finally:
            self._training, self.orders = outer  # frees the data

    @property
    def training(self) -> ShardedEpochIterator:
        """The training data of the running `fit`."""
        if self._training is None:
            raise ScopeError(
                "fit is not running. Received: a use of its data. Expected a call within fit. Fix: call fit."
            )
        return self._training

    @property
    def draws_in_background(self) -> bool:
        """Whether the user's code draws random numbers for the running `fit` in a background thread."""
        return holds_random_state(self.training.data_adapter.source)

    def make_iterator(
        self, method: str, adapter: Any, *, steps_per_epoch: int | None, steps_per_execution: int, is_for_training: bool
    ) -> ShardedEpochIterator:
        """Returns this rank's shards of a call's data.

        Collective: every rank must call this, in the same order.

        Args:
            method: str, the method.
            adapter: Keras' data adapter of the user's data.
            steps_per_epoch: int or `None`, as given by the user.
            steps_per_execution: int, the steps in one call of the model's function.
            is_for_training: bool, whether Keras' `fit` trains on the data.

        Raises:
            DataError: if the ranks cannot read the data in one order.
            MismatchError: if the ranks have different kinds of data.
        """
        # The first data of a `fit` that does not call Keras' own, too.
        trains = is_for_training or (method == "fit" and self._training is None)
        make = functools.partial(
            make_source,
            adapter,
            self._engine,
            scale_batch=self._settings.scale_batch,
            auto_shard=self._settings.auto_shard,
            steps_per_epoch=_steps_per_epoch(adapter, steps_per_epoch, steps_per_execution),
            micro_batches=self._settings.micro_batches if trains else None,
        )
        self._num_sources += 1
        source = make(seed=input_seed(self._random_state, self._num_sources))
        num_own_batches = check_inputs(method, adapter, source, self._engine, auto_shard=self._settings.auto_shard)
        source.end_together(num_own_batches)

        def remake(seed: int) -> Source:
            made = make(seed=seed)
            made.end_together(num_own_batches)
            return made

        if method == "predict" and self.widths_differ != (widths_differ := not has_fixed_shapes(source)):
            self.widths_differ, self._model.predict_function = widths_differ, None
        if trains and holds_random_state(source) and not self._holds_random_state:
            self._holds_random_state = True
            self._strategy.draws.num_holding += 1
        iterator = ShardedEpochIterator(
            SourceAdapter(source, functools.partial(self.agree_random_state, method), is_for_training=trains),
            strategy=self._strategy,
            steps_per_epoch=source.plan.job_steps_per_epoch,
            steps_per_execution=_steps_per_execution(steps_per_execution, source),
            model=self._model,
            begin_pass=self._begin_pass,
            end_pass=self._end_pass,
            is_chief=self._engine.rank == 0,
            remake=remake,
        )
        if trains:
            self._training = iterator
        return iterator

    def begin_call(self, method: str, arguments: dict[str, Any], *, is_outermost: bool) -> None:
        """Compares the arguments of a call over the ranks, and broadcasts random states; see `agree_random_state`.

        A dataset continues after the orders of its seeded shuffles that rank 0 has made by hand.

        Collective: every rank must call this, in the same order.

        Args:
            method: str, the method.
            arguments: dict, its arguments by name.
            is_outermost: bool, whether no other call of the model runs: the orders of its inputs follow from rank 0's
                random state at its beginning.

        Raises:
            MismatchError: if the ranks call other methods, or with other arguments.
        """
        what = f"the arguments of {method}"
        orders = OrdersByHand(arguments)
        # Rank 0's own, of now: what draws in the background may have changed it again after the message.
        state = repr(random.getstate()) if is_outermost and self._engine.rank == 0 else None
        gathered = self._agree(what, [comparable(arguments), orders.made(), state])
        by_rank, made, states = ([each[part] for each in gathered] for part in range(3))
        orders.skip(made[0])
        if is_outermost:
            self._random_state = states[0]

        def refuse(name: str, rank: int) -> None:
            if name.startswith(CLASS_WEIGHT):  # compared before the data, from which it usually follows
                mine, theirs = (each.get(name, "nothing") for each in (by_rank[0], by_rank[rank]))
                raise MismatchError(
                    f"Each rank has other class weights. The likely cause is a `train_test_split` without "
                    f"`random_state` before the scope, from which they were computed. Received: {name} is {mine} on "
                    f"rank 0 and {theirs} on rank {rank} in `model.{method}`. Expected the same on all ranks. Fix: "
                    "pass a seed (`random_state=0`, `default_rng(0)`) to what splits or shuffles the data."
                )

        refuse_differences(what, by_rank, refuse)

    def agree_random_state(self, method: str) -> dict[str, Any] | None:
        """Broadcasts rank 0's random states, unless a generator in a background thread draws from them.

        What `tf.random` draws is agreed on always: such threads draw by themselves.

        Collective: every rank must call this, in the same order.

        Args:
            method: str, the method.

        Returns:
            These states; `None` if they were not agreed on.
        """
        self._agree(f"model.{method}", None)
        return self._strategy.draws.agreed

    def _agree(self, what: str, given: Any) -> list[Any]:
        # The state of such a generator must not change while it prefetches, whichever model trains on it.
        with_states = not self._strategy.draws.num_holding
        return self._strategy.draws.agree(self._engine, what, with_states=with_states, given=given)


def _steps_per_epoch(adapter: Any, given: int | None, steps_per_execution: int) -> int | None:
    """Returns the user's steps of an epoch, whose last execution is whole in Keras, unless the data ends there."""
    if limit := getattr(keras.config, "max_steps_per_epoch", lambda: None)():  # for trials
        given = min(given or limit, limit)
    if given is None:
        return None
    given = operator.index(given)  # it may be NumPy's, and goes into messages and checkpoints
    whole = -(-given // steps_per_execution) * steps_per_execution
    return max(given, min(whole, adapter.num_batches or whole))


def _steps_per_execution(given: int, source: Source) -> int:
    """Returns the job's steps in an execution: 1 where the user's number does not fill the last one of an epoch.

    The end of data of unknown length is found within a step: earlier steps of the execution would be lost. And an
    execution that an epoch's steps do not fill would take those of the next epoch.
    """
    job_steps = source.plan.job_steps_per_epoch
    is_filled = (job_steps or 0) % given == 0 or job_steps == source.num_steps
    if not source.has_uneven_shards and is_filled:
        return given
    if given > 1 and job_steps:
        once.info(f"steps_per_execution: 1, as {given} does not divide the job's {job_steps} steps")
    return 1
