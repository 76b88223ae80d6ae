"""Keras' epoch iterator over a rank's shards: it owns the number of steps, and knows where a pass begins and ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kdist.data.shard import Shard
from kdist.data.source import Source, no_samples
from kdist.training import _keras_internals as internals
from kdist.training.sources import batch_to_build_on


class SourceAdapter(internals.DataAdapter):
    """A source in the form that Keras takes data from.

    Args:
        source: `Source`, this rank's shards.
        before_hook: callable, runs on all ranks before the source's own epoch hooks: these may shuffle.
    """

    def __init__(self, source: Source, before_hook: Callable[[], None]) -> None:
        self.source = source
        self._before_hook = before_hook

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
        self._before_hook()
        self.source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tells the source that an epoch has ended."""
        self._before_hook()
        self.source.on_epoch_end()


class ShardedEpochIterator(internals.TFEpochIterator):
    """Iterates over a rank's shards, and says when a pass over them begins and ends.

    Args:
        adapter: `SourceAdapter`, the data.
        strategy: the strategy, as Keras' own iterator takes it.
        steps_per_epoch: int or `None`, steps of an epoch if the user gave their number.
        steps_per_execution: int, steps a call of the training function makes.
        begin_pass: callable, runs on all ranks before the first step of a pass.
        end_pass: callable, runs on all ranks after the last step of a pass.
        is_chief: bool, whether this rank gives Keras' warnings.
    """

    def __init__(
        self,
        adapter: SourceAdapter,
        *,
        strategy: tf.distribute.Strategy,
        steps_per_epoch: int | None,
        steps_per_execution: int,
        begin_pass: Callable[[], None],
        end_pass: Callable[[], None],
        is_chief: bool,
    ) -> None:
        internals.EpochIterator.__init__(
            self, adapter, steps_per_epoch=steps_per_epoch, steps_per_execution=steps_per_execution
        )
        self._distribute_strategy = strategy
        self._distributed_dataset = adapter.get_tf_dataset()
        self._begin_pass = begin_pass
        self._end_pass = end_pass
        self._is_chief = is_chief
        self._is_first_pass = True

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
        with super().catch_stop_iteration():
            try:
                yield
            except (StopIteration, tf.errors.OutOfRangeError):
                # An execution of several steps may have made some of them before the data ended.
                if self._is_first_pass and self._steps_seen == self.steps_per_execution == 1:
                    raise no_samples("dataset") from None
                raise
        self._is_first_pass = False
        self._end_pass()

    def _interrupted_warning(self) -> None:
        if self._is_chief:
            super()._interrupted_warning()

    def batch_to_build_on(self) -> Any:
        """Returns a batch, or its signature where that is enough, without taking one from the epoch."""
        return batch_to_build_on(self.data_adapter.source)
