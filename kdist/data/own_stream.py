"""Input that each rank has for itself: its streams may end at different steps."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kdist.data import variants
from kdist.data.shard import Shard, blank_row, int64, slice_rows, split_batch
from kdist.data.sharding import Plan
from kdist.data.source import Source
from kdist.errors import DataError


class OwnStream(Source):
    """A stream that is this rank's own already.

    After its end the rank carries a row that does not count, for ever: its last batch's first row, or zeros
    if it never had any. The training loop ends an epoch when no rank has a row that counts.

    Args:
        source: `Source` of the rank's own data, made with `plan.alone()`.
        plan: `Plan` of the job. Of `steps_per_epoch` batches, a rank takes its share from its own stream.
        pieces: int, the number of steps in which each batch is taken, a near-equal slice at a time.
    """

    ends_by_agreement = True

    def __init__(self, source: Source, plan: Plan, *, pieces: int = 1):
        self.plan = plan
        self._source = source
        self._pieces = pieces
        self.draws_in_background = source.draws_in_background
        self.follows_iterators = source.follows_iterators
        self.has_hooks = source.has_hooks

    @property
    def num_steps(self) -> None:
        """`None`: other ranks' streams may be longer."""
        return

    @property
    def signature(self) -> Any:
        """Structure of specs of `Shard.data`."""
        return self._source.signature

    def example(self) -> Any:
        """Returns a batch of this rank's own, or a row of zeros if it has none."""
        try:
            return self._source.example()
        except DataError:
            return blank_row(self.signature)

    def repeat_hook(self, name: str) -> None:
        """Calls the user's own hook."""
        self._source.repeat_hook(name)

    def resume(self, epoch: int, pass_epoch: int | None, pass_step: int) -> None:
        """Takes up an interrupted training."""
        self._source.resume(epoch, pass_epoch, 0)  # its steps are not those of the job

    def on_epoch_begin(self) -> None:
        """Is called before the first element of an epoch is drawn."""
        self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Is called after the last element of an epoch was drawn."""
        self._source.on_epoch_end()

    def dataset(self) -> tf.data.Dataset:
        """Returns the endless dataset of this rank's `Shard` elements."""
        own = self._source.dataset().map(lambda shard: (shard.data, shard.rows))
        if self._pieces > 1:
            own = own.flat_map(self._cut)
        signature, blank = self.signature, blank_row(self.signature)
        idle = tf.data.Dataset.from_tensors((blank, tf.constant(0, tf.int64))).repeat()
        own = self._pad_epochs(own, idle).concatenate(idle)

        def last_row_when_idle(last: Any, element: Any) -> Any:
            data, rows = element
            data = variants.unwrap(signature, tf.cond(rows > 0, lambda: variants.wrap(data), lambda: last))
            return variants.wrap(slice_rows(data, 0, 1)), Shard(data, rows, tf.constant(-1, tf.int64))

        return own.scan(variants.wrap(blank), last_row_when_idle).prefetch(tf.data.AUTOTUNE)

    def _cut(self, data: Any, rows: Any) -> tf.data.Dataset:
        del rows
        return tf.data.Dataset.range(self._pieces).map(lambda piece: split_batch(data, self._pieces, piece)[:2])

    def _pad_epochs(self, own: tf.data.Dataset, idle: tf.data.Dataset) -> tf.data.Dataset:
        steps, plan = self.plan.job_steps_per_epoch, self.plan
        if steps is None or plan.steps_per_epoch is None or not plan.scale_batch:
            return own
        share = len(range(plan.shard_id, plan.steps_per_epoch, plan.num_shards))
        if share == steps:
            return own
        turns = tf.data.Dataset.range(steps).map(lambda turn: int64(turn >= share)).repeat()
        return tf.data.Dataset.choose_from_datasets([own, idle], turns, stop_on_empty_dataset=True)
