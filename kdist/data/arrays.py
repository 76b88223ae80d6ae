"""Arrays and tensors: consecutive rows of one common order."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.data import sharding
from kdist.data.glimpse import places, summary
from kdist.data.shard import Shard, batch_signature, lists_to_tuples
from kdist.data.sharding import Plan
from kdist.data.source import Source


class ArraySource(Source):
    """This rank's rows of arrays that every rank holds whole.

    A step takes `batch_size * num_shards` consecutive samples of the epoch's order (`batch_size` when the
    batch is not scaled) and splits them into near-equal contiguous slices.

    Args:
        inputs: structure of dense, sparse or ragged tensors with `num_samples` rows each; `None` is kept.
        num_samples: int, the number of rows.
        batch_size: int, the user's batch size.
        plan: `Plan`.
        shuffle: `True` for a new order of all samples in each epoch, `"batch"` to change places within a
            step only, `False` for the given order.
        gather: optional callable that takes an `int64` vector of row numbers and returns the batch, for
            inputs that `tf.gather` does not know. It is traced into a graph.

    Raises:
        DataError: if there is no sample.
    """

    def __init__(
        self,
        inputs: Any,
        num_samples: int,
        batch_size: int,
        plan: Plan,
        *,
        shuffle: bool | str = False,
        gather: Callable[[Any], Any] | None = None,
    ):
        self.plan = plan
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._gather = gather or row_gatherer(inputs)
        self._starts, self._stops, self._rows, self._global_rows = sharding.own_rows(num_samples, batch_size, plan)
        self._positions = np.concatenate(
            [np.arange(start, stop) for start, stop in zip(self._starts, self._stops, strict=True)]
        )
        self._epoch = -1
        self._resumed_pass: int | None = None

    @property
    def num_steps(self) -> int:
        """The number of steps in a pass over the arrays."""
        return len(self._rows)

    @property
    def extent(self) -> int:
        """The number of samples."""
        return self._num_samples

    @property
    def signature(self) -> Any:
        """Structure of specs of `Shard.data`."""
        return batch_signature(self._dataset.element_spec.data)

    def glimpse(self) -> list[str]:
        """Returns what some rows look like, by which ranks can tell whether they hold the same arrays."""
        rows = tf.nest.flatten(self._gather(tf.constant(places(self._num_samples))), expand_composites=True)
        return [summary(np.asarray(leaf)) for leaf in rows if leaf is not None]

    @property
    def batch_size(self) -> int:
        """The user's batch size."""
        return self._batch_size

    def resume(self, epoch: int, pass_epoch: int | None, pass_step: int) -> None:
        """Takes up the order of an interrupted pass: what of it is passed over costs next to nothing."""
        self._epoch, self._resumed_pass = epoch, pass_epoch

    def on_epoch_begin(self) -> None:
        """Moves on to the next epoch's order."""
        self._epoch += 1

    def dataset(self) -> tf.data.Dataset:
        """Returns the dataset of this rank's `Shard` elements."""
        return self._dataset

    @functools.cached_property  # to trace its functions takes as long as many a small step
    def _dataset(self) -> tf.data.Dataset:
        sizes = self._stops - self._starts
        ends = np.cumsum(sizes)
        steps = (ends - sizes, ends, self._rows, self._global_rows)
        # A static batch size spares compilers a dynamic shape; only ragged steps prevent it, on all ranks: Keras
        # weights what it means over steps by rows where it knows their number.
        size = int(sizes[0]) if (self._global_rows == self._global_rows[0]).all() else None

        # TensorFlow never lets go of the functions of Python's that it calls: what this one holds would stay, arrays
        # and all.
        this, gather, length = weakref.proxy(self), self._gather, len(self._positions)

        def own_indices() -> Any:
            return this._own_indices()

        def indices_of_a_pass(_: Any) -> Any:
            indices = tf.numpy_function(own_indices, [], tf.int64)
            indices.set_shape([length])
            return indices

        def pair_with_steps(indices: Any) -> Any:
            every_step = tf.data.Dataset.from_tensors(indices).repeat()
            return tf.data.Dataset.zip(tf.data.Dataset.from_tensor_slices(steps), every_step)

        def draw(step: Any, indices: Any) -> Shard:
            start, stop, rows, global_rows = step
            own = indices[start:stop]
            own.set_shape([size])
            return Shard(gather(own), rows, global_rows)

        dataset = tf.data.Dataset.range(1).map(indices_of_a_pass).prefetch(1).flat_map(pair_with_steps)
        dataset = dataset.map(draw)
        options = tf.data.Options()
        # As Keras does: the optimizer would serialise the arrays to look at a pipeline that has nothing to gain.
        options.experimental_optimization.apply_default_optimizations = False
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        options.deterministic = True
        # There is nothing to tune, and a tuned iterator that ends keeps the next epoch waiting for its tuner's sleep.
        options.autotune.enabled = False
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.num_steps))
        return dataset.prefetch(2).with_options(options)

    def _own_indices(self) -> Any:
        """Returns the rows that this rank draws in a pass that begins in the current epoch."""
        epoch = max(self._epoch, 0) if self._resumed_pass is None else self._resumed_pass
        self._resumed_pass = None
        if self._shuffle == "batch":
            order = sharding.batchwise_order(self._num_samples, self._batch_size, self.plan, epoch)
        elif self._shuffle:
            order = sharding.epoch_order(self._num_samples, self.plan.seed, epoch)
        else:
            return self._positions
        return order[self._positions]


def row_gatherer(inputs: Any) -> Callable[[Any], Any]:
    """Returns a function that gathers rows of every leaf of a structure of tensors."""
    leaves = tf.nest.flatten(inputs)
    # Rows of a sparse tensor are found at once when its entries are grouped by row, once.
    grouped = [_entries_by_row(leaf) if isinstance(leaf, tf.SparseTensor) else leaf for leaf in leaves]

    def gather_leaf(leaf: Any, rows: Any, indices: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, tf.SparseTensor):
            columns, values = (tf.gather(part, indices) for part in rows)
            return _from_entries(columns, values, leaf.shape)
        return tf.gather(leaf, indices)

    def gather(indices: Any) -> Any:
        taken = [gather_leaf(leaf, rows, indices) for leaf, rows in zip(leaves, grouped, strict=True)]
        return lists_to_tuples(tf.nest.pack_sequence_as(inputs, taken))

    return gather


def _entries_by_row(sparse: Any) -> tuple[Any, Any]:
    sparse = tf.sparse.reorder(sparse)
    num_rows = sparse.dense_shape[0]
    row = sparse.indices[:, 0]
    return (
        tf.RaggedTensor.from_value_rowids(sparse.indices[:, 1:], row, num_rows),
        tf.RaggedTensor.from_value_rowids(sparse.values, row, num_rows),
    )


def _from_entries(columns: Any, values: Any, shape: Any) -> Any:
    indices = tf.concat([columns.value_rowids()[:, None], columns.values], 1)
    dense_shape = tf.concat([[columns.nrows()], tf.constant(shape[1:].as_list(), tf.int64)], 0)
    sparse = tf.SparseTensor(indices, values.values, dense_shape)
    sparse.indices.set_shape([None, shape.rank])
    return sparse
