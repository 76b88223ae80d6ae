"""`keras.utils.PyDataset`: each rank loads its own batches only."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from kdist.data import sharding
from kdist.data.generator import num_rows
from kdist.data.glimpse import of_targets
from kdist.data.shard import Shard, batch_signature, slice_rows
from kdist.data.sharding import Plan
from kdist.data.source import Source, no_samples

_log = logging.getLogger("kdist")


class Adapter(Protocol):
    """What Keras' own adapter does with a `PyDataset`: it loads batches, with workers where asked."""

    def get_tf_dataset(self) -> tf.data.Dataset:
        """Returns the dataset of batches."""

    def on_epoch_begin(self) -> None:
        """Starts the workers."""

    def on_epoch_end(self) -> None:
        """Stops the workers."""


class ShardedPyDataset(keras.utils.PyDataset):
    """This rank's part of a user's `PyDataset`, itself a `PyDataset` with one element a step.

    An element is `{"data": batch, "rows": array}`, the array being a `Shard`'s `[rows, global_rows]`. The order of
    the batches, where it is shuffled, is ours, since each rank would draw another.

    Args:
        py_dataset: the user's `keras.utils.PyDataset`.
        plan: `Plan`.
        shuffle: bool, whether the batches come in another order in each pass.
        standardize: optional callable applied to each batch that the user's dataset returns, as Keras' adapter
            does: it checks the structure and applies class weights.

    Attributes:
        num_user_batches: int or `None`, the batches of the user's dataset; `None` if they never end.
        seen_targets: list of str, what the targets of the first batch look like, once it was looked at.

    Raises:
        DataError: if the dataset has no batch.
    """

    def __init__(
        self,
        py_dataset: keras.utils.PyDataset,
        plan: Plan,
        *,
        shuffle: bool = False,
        standardize: Callable[[Any], Any] | None = None,
    ):
        super().__init__(
            workers=py_dataset.workers,
            use_multiprocessing=py_dataset.use_multiprocessing,
            max_queue_size=py_dataset.max_queue_size,
        )
        self.plan = plan
        self._py_dataset = py_dataset
        self._shuffle = shuffle
        self._standardize = standardize
        self.num_user_batches = py_dataset.num_batches
        self._epoch = -1
        self._resumed_epoch = -1
        self._passed_over: tuple[int, dict[str, Any] | None] = (0, None)
        self._is_looked_at = False
        self.seen_targets: list[str] = []
        if self.num_user_batches is not None and self.num_user_batches < 1:
            raise no_samples("PyDataset")
        if self.use_multiprocessing and plan.num_shards > 1:
            _log.warning(
                "`use_multiprocessing=True` in %s forks a process that uses MPI, which may hang or crash. "
                "Use threads instead: `workers=n, use_multiprocessing=False`.",
                type(py_dataset).__name__,
            )

    @property
    def num_steps(self) -> int | None:
        """The steps of a pass over the data; `None` if it never ends."""
        batches = self.num_user_batches
        return None if batches is None else sharding.num_steps(batches, self.plan)

    @property
    def num_batches(self) -> int | None:
        """The number of elements; `None` if they never end."""
        if self._is_looked_at:
            return self.num_user_batches
        return None if self._goes_on else self.num_steps

    @property
    def _goes_on(self) -> bool:
        # Keras' workers start anew from the first batch whenever an epoch ends, with what they loaded ahead still
        # queued. Where a pass holds several epochs only an endless dataset keeps its place.
        return self.num_steps is None or (self.plan.steps_per_epoch is not None and self._has_workers)

    @property
    def _has_workers(self) -> bool:
        return self.workers > 1 or (self.workers > 0 and self.use_multiprocessing)

    def __getitem__(self, step: int) -> dict[str, Any]:
        """Loads this rank's batch of a step; one that an interrupted training had already is not loaded again."""
        if self._is_looked_at:
            batch = self._batch(step)
            if step == 0:
                self.seen_targets = of_targets(batch)
            return self._element(batch, 0, 1, [1, 1])
        first, instead = self._passed_over
        if step < first and self._epoch == self._resumed_epoch:
            if instead is None:
                instead = self._load(first)
                self._passed_over = first, instead
            return instead
        return self._load(step)

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[None]:
        """Shows the user's own first batches, as in one process, by which Keras tells the shapes of all.

        A rank's own may have one length by chance, and the other ranks' another.
        """
        self._is_looked_at = True
        try:
            yield
        finally:
            self._is_looked_at = False

    def resume(self, epoch: int, pass_step: int) -> None:
        """Takes up an interrupted training after a number of steps."""
        self._epoch, self._resumed_epoch = epoch, epoch + 1
        self._passed_over = pass_step, None

    def _load(self, step: int) -> dict[str, Any]:
        plan, total, number = self.plan, self.num_user_batches, self._pass_of_epoch()
        if self.num_steps is not None:
            ahead, step = divmod(step, self.num_steps)
            number += ahead
        batch_number, active = sharding.own_batch(step, total, plan)
        if self._shuffle and total is not None:
            batch_number = int(_order(total, plan.seed, number)[batch_number])
        batch = self._batch(batch_number)
        rows = num_rows(batch)
        start, stop = (0, rows if active else 1)
        if not plan.scale_batch:
            start, stop = sharding.split_rows(rows, plan.num_shards, plan.shard_id)
            active = stop > start
        count = [stop - start if active else 0, -1 if plan.scale_batch else rows]
        return self._element(batch, start, stop, count) if active else self._element(batch, 0, 1, count)

    def _batch(self, number: int) -> Any:
        batch = self._py_dataset[number]
        return batch if self._standardize is None else self._standardize(batch)

    def _element(self, batch: Any, start: int, stop: int, count: list[int]) -> dict[str, Any]:
        return {"data": slice_rows(batch, start, stop), "rows": np.array(count, np.int64)}

    def on_epoch_begin(self) -> None:
        """Passes the call on to the user's dataset."""
        self._py_dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Passes the call on to the user's dataset."""
        self._py_dataset.on_epoch_end()

    @property
    def has_hooks(self) -> bool:
        """Whether the user's dataset does something when an epoch begins or ends."""
        own, plain = type(self._py_dataset), keras.utils.PyDataset
        return own.on_epoch_begin is not plain.on_epoch_begin or own.on_epoch_end is not plain.on_epoch_end

    def next_epoch(self) -> None:
        """Moves on to the next epoch's order; must come before the workers start."""
        self._epoch += 1

    def _pass_of_epoch(self) -> int:
        epoch, batches, per_epoch = max(self._epoch, 0), self.num_user_batches, self.plan.steps_per_epoch
        if batches is None or (self._goes_on and self._has_workers):
            return 0
        return epoch if per_epoch is None else epoch // -(-batches // per_epoch)


class PyDatasetSource(Source):
    """This rank's part of a `PyDataset`, loaded by Keras' own adapter.

    The rows of a step are not known without loading the others' batches: `global_rows` is -1 unless each
    batch is split.

    Args:
        sharded: `ShardedPyDataset`.
        adapter: Keras' `PyDatasetAdapter` made with `sharded` and without `shuffle` or `class_weight`.
    """

    draws_in_background = True

    def __init__(self, sharded: ShardedPyDataset, adapter: Adapter):
        self.plan = sharded.plan
        self._sharded = sharded
        self._adapter = adapter
        self.has_hooks = sharded.has_hooks
        with sharded.looked_at():
            batches = adapter.get_tf_dataset()
        self._dataset = batches.map(_shard)

    @property
    def knows_global_rows(self) -> bool:
        """Whether the rows of all ranks are known: only where every rank loads every batch."""
        return not self.plan.scale_batch

    @property
    def num_steps(self) -> int | None:
        """The steps of a pass over the data; `None` if it never ends."""
        return self._sharded.num_steps

    @property
    def extent(self) -> int | None:
        """The number of the user's batches; `None` if they never end."""
        return self._sharded.num_user_batches

    @property
    def signature(self) -> Any:
        """Structure of specs of `Shard.data`."""
        return batch_signature(self._dataset.element_spec.data)

    def seen_targets(self) -> list[str]:
        """Returns what the targets of the user's first batch look like."""
        return self._sharded.seen_targets

    def example(self) -> Any:
        """Returns a batch of this rank's, loaded for this only."""
        return tf.nest.map_structure(_tensor, self._sharded[0]["data"])

    def dataset(self) -> tf.data.Dataset:
        """Returns the dataset of this rank's `Shard` elements."""
        return self._dataset

    def repeat_hook(self, name: str) -> None:
        """Calls the user's own hook, and not what Keras' adapter does around it."""
        getattr(self._sharded, name)()

    def resume(self, epoch: int, pass_epoch: int | None, pass_step: int) -> None:
        """Takes up an interrupted training: what is passed over is not loaded."""
        self._sharded.resume(epoch, pass_step)

    def on_epoch_begin(self) -> None:
        """Moves on to the next epoch's order and starts the workers."""
        self._sharded.next_epoch()
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Stops the workers."""
        self._adapter.on_epoch_end()


def _shard(element: dict[str, Any]) -> Shard:
    rows = element["rows"]
    return Shard(element["data"], rows[0], rows[1])


def _tensor(leaf: Any) -> Any:
    return None if leaf is None else tf.convert_to_tensor(leaf) if not tf.is_tensor(leaf) else leaf


@functools.lru_cache(maxsize=2)
def _order(num_batches: int, seed: int, number: int) -> sharding.Indices:
    return sharding.epoch_order(num_batches, seed, number)
