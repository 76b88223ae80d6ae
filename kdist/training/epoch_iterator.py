"""Keras' epoch iterator over a rank's shards: it owns the number of steps, and knows where a pass begins and ends."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist.data.py_dataset import PyDatasetSource
from kdist.data.shard import Shard
from kdist.data.source import Source, no_samples
from kdist.training import _keras_internals as internals
from kdist.training.position import Position
from kdist.training.sources import batch_to_build_on
from kdist.training.state import random_state, set_random_state
from kdist.training.step_wrappers import replaced


class SourceAdapter(internals.DataAdapter):
    """A source in the form that Keras takes data from.

    Args:
        source: `Source`, this rank's shards.
        before_hook: callable, runs on all ranks before the source's own epoch hooks: these may shuffle.

    Attributes:
        hooks: list of tuples `(name, states)`, which hooks of the user's were called, and in which random state,
            packed: there are two more with each epoch.
    """

    def __init__(self, source: Source, before_hook: Callable[[], None]) -> None:
        self.source = source
        self._before_hook = before_hook
        self.hooks: list[tuple[str, bytes]] = []

    def get_tf_dataset(self) -> tf.data.Dataset:
        """Returns a dataset of `Shard`; one pass over it is an epoch."""
        dataset = self.source.dataset()
        if self.source.knows_global_rows:
            return dataset
        # Nothing in the place of the count makes steps with and without it two traces.
        return dataset.map(lambda shard: Shard(shard.data, shard.rows, ()))

    @property
    def num_batches(self) -> int | None:
        """The number of steps of an epoch; `None` if unknown."""
        return self.source.num_steps

    @property
    def batch_size(self) -> int | None:
        """Not told: a step's rows are in its `Shard`."""
        return None

    def on_epoch_begin(self) -> None:
        """Tells the source that an epoch begins."""
        self._prepare("on_epoch_begin")
        self.source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tells the source that an epoch has ended."""
        self._prepare("on_epoch_end")
        self.source.on_epoch_end()

    def _prepare(self, name: str) -> None:
        self._before_hook()
        if self.source.has_hooks:
            self.hooks.append((name, zlib.compress(json.dumps(random_state()).encode())))

    def repeat_hooks(self, hooks: list[tuple[str, bytes]]) -> None:
        """Calls what the user's hooks were called for before an interruption, in the random states that were.

        Args:
            hooks: list as in `hooks`, from the beginning of `fit`.
        """
        for name, states in hooks[len(self.hooks) :]:
            set_random_state(json.loads(zlib.decompress(states)))
            self.source.repeat_hook(name)
        self.hooks = list(hooks)


class _Pass:
    """A pass over a dataset, begun when its first element is asked for: Keras makes one more an epoch than it uses.

    Args:
        dataset: `tf.data.Dataset`.
        at_once: bool, whether to begin now: the user's dataset counts its iterators.
    """

    def __init__(self, dataset: tf.data.Dataset, *, at_once: bool) -> None:
        self._dataset = dataset
        if at_once:
            _ = self.elements

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        return next(self.elements)

    @functools.cached_property
    def elements(self) -> Iterator[Any]:
        """The iterator that a step draws from."""
        return iter(self._dataset)


class ShardedEpochIterator(internals.TFEpochIterator):
    """Iterates over a rank's shards, and says when a pass over them begins and ends.

    Args:
        adapter: `SourceAdapter`, the data.
        strategy: the strategy, as Keras' own iterator takes it.
        steps_per_epoch: int or `None`, steps of an epoch if the user gave their number.
        steps_per_execution: int, steps a call of the model's function makes during a pass.
        model: `keras.Model`, which makes them.
        begin_pass: callable, runs on all ranks before the first step of a pass.
        end_pass: callable, runs on all ranks after the last step of a pass.
        is_chief: bool, whether this rank gives Keras' warnings.
        remake: callable that makes the source anew, with another base of its orders.
    """

    def __init__(
        self,
        adapter: SourceAdapter,
        *,
        strategy: tf.distribute.Strategy,
        steps_per_epoch: int | None,
        steps_per_execution: int,
        model: keras.Model,
        begin_pass: Callable[[], None],
        end_pass: Callable[[], None],
        is_chief: bool,
        remake: Callable[[int], Source],
    ) -> None:
        internals.EpochIterator.__init__(
            self, adapter, steps_per_epoch=steps_per_epoch, steps_per_execution=steps_per_execution
        )
        self._distribute_strategy = strategy
        self._distributed_dataset = adapter.get_tf_dataset()
        self._model = model
        self._begin_pass = begin_pass
        self._end_pass = end_pass
        self._is_chief = is_chief
        self._remake = remake
        self._is_first_pass = True
        # Where training stands: see `Position`.
        self._source_epoch = -1
        self._pass_epoch = -1
        self._num_passes = 0
        self._resumed: Position | None = None

    def reset(self) -> None:
        """Lets the next pass begin anew; what can be read only once goes on.

        Keras would lose what a thread has drawn ahead: on each rank another number of batches.
        """
        kept = self._current_iterator if self.data_adapter.source.reads_once else None
        super().reset()
        self._current_iterator: Any = kept

    def __iter__(self) -> ShardedEpochIterator:
        """Begins a pass."""
        self._begin_pass()
        return super().__iter__()

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Ends the pass when the loop inside is through, stops, or runs out of data; not when it raises.

        Raises:
            DataError: on all ranks, if the very first step found no data.
        """
        executions = replaced(self._model, "steps_per_execution", self.steps_per_execution)
        with super().catch_stop_iteration(), executions:
            try:
                yield
            except (StopIteration, tf.errors.OutOfRangeError):
                # An execution of several steps may have made some of them before the data ended.
                if self._is_first_pass and self._steps_seen == self.steps_per_execution == 1:
                    raise no_samples("dataset") from None
                raise
        self._is_first_pass = False
        self._end_pass()

    # Where training stands, and how it gets there again.

    def position(self, epoch_step: int) -> Position:
        """Returns where training stands.

        Args:
            epoch_step: int, the steps that the current epoch has made; 0 between epochs.
        """
        source = self.data_adapter.source
        keeps_iterator = self.steps_per_epoch is not None
        return Position(
            kind=type(source).__name__,
            seed=source.plan.seed,
            group_size=source.plan.group_size,
            batch_size=source.batch_size,
            extent=source.extent,
            steps_per_epoch=source.plan.steps_per_epoch,
            num_steps=self._num_batches,
            source_epoch=self._source_epoch,
            num_passes=self._num_passes,
            pass_epoch=self._pass_epoch,
            pass_step=self._steps_seen if keeps_iterator else epoch_step,
            epoch_step=epoch_step,
        )

    def is_last(self, epoch_step: int) -> bool:
        """Returns whether an epoch that has made so many steps is known to be through."""
        num_steps = self.steps_per_epoch or self._num_batches
        is_pass_over = self._num_batches is not None and self._steps_seen >= self._num_batches
        return is_pass_over or (num_steps is not None and epoch_step >= num_steps)

    def resume(self, position: Position) -> Position:
        """Goes to where an interrupted training stood, before the first pass begins.

        Args:
            position: `Position`, of any number of ranks.

        Returns:
            The same place in this data.
        """
        source = self.data_adapter.source
        if position.seed != source.plan.seed and self._remakes(source):
            source = self.data_adapter.source = self._remake(position.seed)
            self._distributed_dataset = self.data_adapter.get_tf_dataset()
        position = position.of_source(source)
        ragged = position.epoch_step % self.steps_per_execution
        position = dataclasses.replace(
            position, epoch_step=position.epoch_step - ragged, pass_step=position.pass_step - ragged
        )
        is_within = position.epoch_step > 0
        self._source_epoch = position.source_epoch - is_within
        self._pass_epoch = position.pass_epoch
        self._is_first_pass = False
        if self._num_batches is None and not self.steps_per_epoch:
            self._num_batches: int | None = position.num_steps
        source.resume(self._source_epoch, position.pass_epoch if position.pass_step else None, position.pass_step)
        begins_later = not is_within and self.steps_per_epoch is None
        for _ in range(position.num_passes - (not begins_later) if source.follows_iterators else 0):
            iter(self._distributed_dataset)
        self._num_passes = position.num_passes - (not begins_later)
        self._resumed = position
        if not begins_later and self.steps_per_epoch is not None:
            self._current_iterator = iter(self._get_iterator())
            self._steps_seen = position.pass_step - position.epoch_step
        return position

    def _remakes(self, source: Source) -> bool:
        return not source.draws_in_background or isinstance(source, PyDatasetSource)

    def _get_iterator(self) -> _Pass:
        """Returns the next pass over the dataset."""
        self._num_passes += 1
        resumed, dataset = self._resumed, self._distributed_dataset
        if resumed is not None and resumed.pass_step:
            dataset = dataset.skip(resumed.pass_step)
        return _Pass(dataset, at_once=self.data_adapter.source.follows_iterators)

    def _enumerate_iterator(self) -> Iterator[Any]:
        """Yields the steps of an epoch; of an interrupted one those that it did not make."""
        self._source_epoch += 1
        made = self._resumed.epoch_step if self._resumed else 0
        for begin, end, iterator in super()._enumerate_iterator():
            self._resumed = None  # a second iterator begins from the beginning
            if begin < made:
                continue
            if self._steps_seen == self.steps_per_execution:
                self._pass_epoch = self._source_epoch
            yield begin, end, iterator.elements

    def _interrupted_warning(self) -> None:
        if self._is_chief:
            super()._interrupted_warning()

    def batch_to_build_on(self, model: keras.Model) -> Any:
        """Returns what a model is built on, without taking a batch from the epoch."""
        return batch_to_build_on(self.data_adapter.source, model)
