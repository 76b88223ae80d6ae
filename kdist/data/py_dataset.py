"""`keras.utils.PyDataset`: each rank loads its own batches only."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.data import sharding
from kdist.data.batch import Rows, Shard
from kdist.data.graphs.fingerprint import fingerprint_of_targets
from kdist.data.graphs.options import untuned
from kdist.data.joined_batches import joined
from kdist.data.sharding import Plan
from kdist.data.source import Source, empty_input_error
from kdist.keras_hooks.fit.data_adapters import PyDatasetAdapter

_log = logging.getLogger("kdist")


class ShardedPyDataset(keras.utils.PyDataset):
    """This rank's shard of a user's `PyDataset`, itself a `PyDataset` with one element a step.

    An element is `{"data": batch, "rows": array}`, the array being a `Shard`'s `[rows, global_rows]`. The order of
    the batches, where it is shuffled, is derived from the plan's seed, since each rank would draw another.

    Args:
        py_dataset: the user's `keras.utils.PyDataset`.
        plan: `Plan`.
        shuffle: bool, whether the batches come in another order in each pass.
        standardize: optional callable applied to each batch that the user's dataset returns, as Keras' adapter
            does: it checks the structure and applies class weights.

    Attributes:
        num_user_batches: int or `None`, the batches of the user's dataset; `None` if they never end.
        targets_fingerprint: list of str, a summary of the targets of the first batch, once it was peeked.
        loading: context in which a batch is loaded; without Keras' workers, only one thread is in it at a time.

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
        self._skipped: tuple[int, dict[str, Any] | None] = (0, None)  # how many steps, and what they yield
        self._is_peeking = False
        self.targets_fingerprint: list[str] = []
        self.loading = contextlib.nullcontext() if self.has_workers else threading.Lock()
        if self.num_user_batches is not None and self.num_user_batches < 1:
            raise empty_input_error("PyDataset")
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
        if self._is_peeking:
            return self.num_user_batches
        return None if self._spans_epochs else self.num_steps

    @property
    def _spans_epochs(self) -> bool:
        """Whether Keras gets an endless dataset, whose position it keeps from epoch to epoch."""
        # Keras' workers restart at the first batch when an epoch ends, with the batches loaded ahead still queued.
        return self.num_steps is None or (self.plan.steps_per_epoch is not None and self.has_workers)

    @property
    def has_workers(self) -> bool:
        """Whether Keras' workers load the batches."""
        return self.workers > 1 or (self.workers > 0 and self.use_multiprocessing)

    def __getitem__(self, step: int) -> dict[str, Any]:
        """Loads this rank's batch of a step; batches of steps before an interruption are not loaded again."""
        if self._is_peeking:
            batch = self._batch(step)
            if step == 0:
                self.targets_fingerprint = fingerprint_of_targets(batch)
            rows = Rows(batch)
            return _element(rows.head(batch, 1) if self.plan.scale_batch else rows.slice(batch, 0, 1), [1, 1])
        num_skipped, substitute = self._skipped
        if step < num_skipped and self._epoch == self._resumed_epoch:
            if substitute is None:
                substitute = self._load(num_skipped)
                self._skipped = num_skipped, substitute
            return substitute
        return self._load(step)

    @contextlib.contextmanager
    def peeking(self) -> Iterator[None]:
        """Makes the elements the user's first batches, as in one process: Keras infers the shapes of all from them.

        The first batches of a rank may all have one length by chance, and those of another rank another length.
        """
        self._is_peeking = True
        try:
            yield
        finally:
            self._is_peeking = False

    def resume(self, epoch: int, pass_step: int) -> None:
        """Resumes an interrupted training after a number of steps."""
        self._epoch, self._resumed_epoch = epoch, epoch + 1
        self._skipped = pass_step, None

    def _load(self, step: int) -> dict[str, Any]:
        plan, total, number = self.plan, self.num_user_batches, self._pass_of_epoch()
        if self.num_steps is not None:
            ahead, step = divmod(step, self.num_steps)
            number += ahead
        first, count = sharding.batches_of_step(step, total, plan)
        numbers = list(range(first, first + max(count, 1)))
        if self._shuffle and total is not None:
            numbers = _order(total, plan.seed, number)[numbers].tolist()
        batch = joined([self._batch(each) for each in numbers])
        rows = Rows(batch)
        total = rows.count(batch)
        if plan.scale_batch:
            return _element(batch if count else rows.head(batch, 1), [total if count else 0, -1])
        part = rows.split_eagerly(batch, plan.num_shards, plan.shard_id)
        return _element(part.data, [part.rows, part.global_rows])

    def _batch(self, number: int) -> Any:
        with self.loading:
            batch = self._py_dataset[number]
        return batch if self._standardize is None else self._standardize(batch)

    def call_hook(self, name: str) -> None:
        """Calls the user's `on_epoch_begin` or `on_epoch_end`."""
        getattr(self._py_dataset, name)()

    @property
    def has_hooks(self) -> bool:
        """Whether the user's dataset does something when an epoch begins or ends."""
        cls, base = type(self._py_dataset), keras.utils.PyDataset
        return cls.on_epoch_begin is not base.on_epoch_begin or cls.on_epoch_end is not base.on_epoch_end

    def next_epoch(self) -> None:
        """Continues with the next epoch's order and length, by the user's hook, before the workers start."""
        self._epoch += 1
        self.call_hook("on_epoch_begin")
        self.num_user_batches = self._py_dataset.num_batches

    def _pass_of_epoch(self) -> int:
        epoch, batches, per_epoch = max(self._epoch, 0), self.num_user_batches, self.plan.steps_per_epoch
        if batches is None or (self._spans_epochs and self.has_workers):
            return 0
        return epoch if per_epoch is None else epoch // -(-batches // per_epoch)


class PyDatasetSource(Source):
    """This rank's shard of a `PyDataset`, loaded by Keras' adapter.

    The rows of a step are not known without loading the others' batches: `global_rows` is -1 unless each
    batch is split.

    Args:
        sharded: `ShardedPyDataset`.
    """

    draws_in_background = True

    def __init__(self, sharded: ShardedPyDataset):
        self.plan = sharded.plan
        self._sharded = sharded
        self._adapter = PyDatasetAdapter(sharded)
        self.has_hooks = sharded.has_hooks
        self.has_workers = sharded.has_workers
        self.cardinality = sharded.num_user_batches
        self.knows_global_rows = not self.plan.scale_batch  # only where every rank loads every batch
        with sharded.peeking():
            batches = self._adapter.get_tf_dataset()
        # Without workers it ends with `prefetch(AUTOTUNE)`, whose buffer grows without the tuner.
        self._dataset = untuned(batches.map(_shard))

    def targets_fingerprint(self) -> list[str]:
        """Returns a summary of the targets of the user's first batch."""
        return self._sharded.targets_fingerprint

    def example(self) -> Any:
        """Returns this rank's first batch, which is loaded once more for this."""
        return tf.nest.map_structure(_tensor, self._sharded[0]["data"])

    def dataset(self) -> tf.data.Dataset:
        """Returns the dataset of this rank's `Shard` elements."""
        return self._dataset

    def repeat_hook(self, name: str) -> None:
        """Calls the user's hook, without Keras' adapter, which would start or stop its workers."""
        self._sharded.call_hook(name)

    @contextlib.contextmanager
    def holding_loaders(self) -> Iterator[None]:
        """A context in which no batch is loaded: Keras' workers are stopped, and the thread that reads ahead waits."""
        if self._adapter.enqueuer:
            self._adapter.enqueuer.stop()
        with self._sharded.loading:
            yield

    def resume(self, epoch: int, pass_epoch: int | None, pass_step: int) -> None:
        """Resumes an interrupted training: skipped batches are not loaded."""
        self._sharded.resume(epoch, pass_step)

    def on_epoch_begin(self) -> None:
        """Continues with the next epoch's order, calls the user's hook, and starts the workers."""
        self._sharded.next_epoch()
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Stops the workers, and calls the user's hook."""
        self._adapter.on_epoch_end()
        self._sharded.call_hook("on_epoch_end")


def _element(batch: Any, rows: list[int]) -> dict[str, Any]:
    return {"data": batch, "rows": np.array(rows, np.int64)}


def _shard(element: dict[str, Any]) -> Shard:
    rows = element["rows"]
    return Shard(element["data"], rows[0], rows[1])


def _tensor(leaf: Any) -> Any:
    return None if leaf is None else tf.convert_to_tensor(leaf) if not tf.is_tensor(leaf) else leaf


@functools.lru_cache(maxsize=2)
def _order(num_batches: int, seed: int, number: int) -> sharding.Indices:
    return sharding.epoch_order(num_batches, seed, number)
