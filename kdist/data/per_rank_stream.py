"""Input that is different on each rank already: the ranks' shards may end at different steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from kdist.data.batch import Rows, Shard, int64, zero_row
from kdist.data.graphs.optionals import from_optional, to_optional
from kdist.data.graphs.options import prefetched
from kdist.data.sharding import Plan, num_steps_of_streams
from kdist.data.source import Source, empty_input_error
from kdist.errors import DataError


class PerRankStream(Source):
    """A stream that is this rank's shard already.

    After its end the rank gets a padding row at each step: the first row of its last batch, or zeros if it never had
    any. A pass ends when all ranks' rows are padding: where the length of a stream is unknown, the training loop finds
    that in a step.

    Args:
        source: `Source` of the rank's data, made with `plan.unsharded()`.
        plan: `Plan` of the job. Of `steps_per_epoch` batches, a rank takes its share from its stream.
        num_splits: int, the number of steps in which each batch is taken, a near-equal slice at a time.
    """

    has_uneven_shards = True
    knows_global_rows = False

    def __init__(self, source: Source, plan: Plan, *, num_splits: int = 1):
        self.plan = plan
        self._source = source
        self._num_splits = num_splits
        self._num_steps: int | None = None
        self.num_own_batches = source.num_steps if num_splits == 1 else None
        self.draws_in_background = source.draws_in_background
        self.reshuffles_each_iteration = source.reshuffles_each_iteration
        self.is_skipped_by_reading = source.is_skipped_by_reading
        self.has_hooks = source.has_hooks

    @property
    def num_steps(self) -> int | None:
        """The number of steps in a pass over the data; `None` if unknown or endless."""
        return self._num_steps

    def end_together(self, num_own_batches: Sequence[int | None]) -> None:
        """Makes the dataset end where all ranks' streams have ended, if the length of each is known.

        Raises:
            DataError: if all are empty.
        """
        known = [each for each in num_own_batches if each is not None]
        if len(known) == len(num_own_batches):
            if not any(known):
                raise empty_input_error("dataset of each rank")
            self._num_steps = num_steps_of_streams(known, self.plan) or None

    @property
    def signature(self) -> Any:
        """Structure of specs of `Shard.data`."""
        return self._source.signature

    def example(self) -> Any:
        """Returns a batch of this rank's, or a row of zeros if it has none."""
        try:
            return self._source.example()
        except DataError:
            return zero_row(self.signature)

    def repeat_hook(self, name: str) -> None:
        """Calls the user's hook."""
        self._source.repeat_hook(name)

    def resume(self, epoch: int, pass_epoch: int | None, pass_step: int) -> None:
        """Resumes an interrupted training."""
        self._source.resume(epoch, pass_epoch, 0)  # its steps are not those of the job

    def holding_loaders(self) -> AbstractContextManager[Any]:
        """Returns a context in which no code of the user's loads batches in the background."""
        return self._source.holding_loaders()

    def on_epoch_begin(self) -> None:
        """Is called before the first element of an epoch is drawn."""
        self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Is called after the last element of an epoch was drawn."""
        self._source.on_epoch_end()

    def dataset(self) -> tf.data.Dataset:
        """Returns the dataset of this rank's `Shard` elements, endless unless the pass has a known number of steps."""
        batches = self.own_batches()
        signature, zeros, rows_of = self.signature, zero_row(self.signature), Rows(self.signature)
        padding = tf.data.Dataset.from_tensors((zeros, tf.constant(0, tf.int64))).repeat()
        batches = self._pad_epochs(batches, padding).concatenate(padding)

        def fill_padding(last_row: Any, element: Any) -> Any:
            data, rows = element
            data = from_optional(signature, tf.cond(rows > 0, lambda: to_optional(data), lambda: last_row))
            return to_optional(rows_of.head(data, 1)), Shard(data, rows, tf.constant(-1, tf.int64))

        shards = batches.scan(to_optional(zeros), fill_padding)
        shards = shards if self.num_steps is None else shards.take(self.num_steps)
        return shards if self._source.has_workers else prefetched(shards)

    def own_batches(self) -> tf.data.Dataset:
        """Returns the dataset of this rank's batches, each with the number of its rows, without padding."""
        batches = self._source.dataset().map(lambda shard: (shard.data, shard.rows))
        if self.num_steps is not None and self.num_own_batches is not None:
            batches = batches.take(self.num_own_batches)  # workers of Keras load the next pass, too
        if self._num_splits > 1:
            # A batch of fewer rows has fewer slices: where all ranks have no row, the pass ends.
            batches = batches.flat_map(self._split).filter(lambda data, rows: rows > 0)
        return batches

    def _split(self, data: Any, _: Any) -> tf.data.Dataset:
        rows = Rows(self.signature)
        return tf.data.Dataset.range(self._num_splits).map(lambda part: rows.split(data, self._num_splits, part)[:2])

    def _pad_epochs(self, batches: tf.data.Dataset, padding: tf.data.Dataset) -> tf.data.Dataset:
        steps, plan = self.plan.job_steps_per_epoch, self.plan
        if steps is None or not plan.scale_batch:
            return batches
        share = plan.own_batches_per_epoch(plan.shard_id)
        if share == steps:
            return batches
        choice = tf.data.Dataset.range(steps).map(lambda step: int64(step >= share)).repeat()
        return tf.data.Dataset.choose_from_datasets([batches, padding], choice, stop_on_empty_dataset=True)
