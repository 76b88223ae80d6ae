"""What a replicated model's verbs run over, in orders that are equal on all ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras

from kdist.errors import ScopeError
from kdist.strategies.all_reduce import AllReduceStrategy
from kdist.training import state
from kdist.training.epoch_iterator import ShardedEpochIterator, SourceAdapter
from kdist.training.input_checks import check_inputs
from kdist.training.settings import Settings
from kdist.training.sources import describe_source, has_fixed_shapes, holds_random_state, make_source


class ReplicatedData:
    """Makes this rank's share of what each verb is given, and watches over the random states that it is drawn from.

    Args:
        model: `keras.Model`.
        strategy: `AllReduceStrategy`.
        settings: `Settings` of the scope.
        begin_pass: function called when a pass over data begins.
        end_pass: function called when a pass over data has ended.

    Attributes:
        widths_differ: bool, whether batches of what `predict` was last given may differ in more than their rows.
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
        self._random_state = ""  # as it was when the outermost verb began: a generator may have drawn from it since
        self._num_sources = 0
        self.widths_differ = False

    @contextlib.contextmanager
    def of_script(self) -> Iterator[None]:
        """Holds while a verb of the user's script runs, and what that calls."""
        self._random_state = repr(random.getstate())
        try:
            yield
        finally:
            self._holds_random_state = False

    @contextlib.contextmanager
    def of_fit(self) -> Iterator[None]:
        """Holds while a `fit` runs: the first data that it makes is what it trains on, later ones validate."""
        outer, self._training = self._training, None
        try:
            yield
        finally:
            self._training = outer  # its own would stay in memory as long as the model

    @property
    def training(self) -> ShardedEpochIterator:
        """The data that the running `fit` trains on."""
        if self._training is None:
            raise ScopeError("Received: a question for the data of fit. Expected a running fit. Fix: call fit.")
        return self._training

    def make_iterator(
        self, verb: str, adapter: Any, *, steps_per_epoch: int | None, steps_per_execution: int
    ) -> ShardedEpochIterator:
        """Returns this rank's share of what a verb is given.

        Collective: every rank must call this, in the same order.

        Args:
            verb: str, who asks.
            adapter: Keras' data adapter of what the user gave.
            steps_per_epoch: int or `None`, as the user gave it.
            steps_per_execution: int, how many steps a call of the model's function makes.

        Raises:
            DataError: if the data cannot be split among the ranks in one order.
            MismatchError: if ranks were given other kinds of data.
        """
        remake = functools.partial(
            make_source,
            adapter,
            self._engine,
            scale_batch=self._settings.scale_batch,
            auto_shard=self._settings.auto_shard,
            steps_per_epoch=steps_per_epoch,
        )
        source = remake(seed=self._next_seed())
        state.check_agreement(self._engine, f"the data given to {verb}", describe_source(source))
        check_inputs(adapter, source, self._engine, auto_shard=self._settings.auto_shard)
        if verb == "predict" and self.widths_differ != (widths_differ := not has_fixed_shapes(source)):
            self.widths_differ, self._model.predict_function = widths_differ, None
        is_for_training = verb == "fit" and self._training is None
        if is_for_training and holds_random_state(source):
            self._holds_random_state = True
        iterator = ShardedEpochIterator(
            SourceAdapter(source, self.agree_random_state),
            strategy=self._strategy,
            steps_per_epoch=source.plan.job_steps_per_epoch,
            # The end of such data is noticed while a step is made: what an execution made before would be lost.
            steps_per_execution=1 if source.ends_by_agreement else steps_per_execution,
            model=self._model,
            begin_pass=self._begin_pass,
            end_pass=self._end_pass,
            is_chief=self._engine.rank == 0,
            remake=lambda seed: remake(seed=seed),
        )
        if is_for_training:
            self._training = iterator
        return iterator

    def agree_random_state(self) -> None:
        """Gives every rank the root's random states, unless a generator in the background draws from them.

        Collective: every rank must call this, in the same order.
        """
        # Such a generator draws ahead in a thread of its own: what it draws from must not change under it.
        if not self._holds_random_state:
            state.agree_random_state(self._engine)

    def _next_seed(self) -> int:
        """Returns the base of the next input's orders: equal on all ranks, another at each call.

        It follows from Python's random state as the verb began, which `keras.utils.set_random_seed` sets, and takes
        nothing from it: what the user's script draws later, the weights of the next model say, stays what it is in one
        process.
        """
        self._num_sources += 1
        text = f"{self._random_state} {self._num_sources}"
        return int(hashlib.sha256(text.encode()).hexdigest()[:7], 16)
