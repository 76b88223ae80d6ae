"""Arrays and tensors: every rank takes its rows of one common order.

To trace a pipeline's functions takes as long as many a small step, so they are traced once a process, and called with
what differs: the arrays, the steps, and the number under which the order of a pass is asked for.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.data import sharding
from kdist.data.batch import Shard, lists_to_tuples
from kdist.data.graphs.fingerprint import row_means, sample_rows
from kdist.data.graphs.options import sharded_options
from kdist.data.graphs.own_functions import applied, map_op, traced
from kdist.data.sharding import Plan
from kdist.data.source import Source

_SCALAR = tf.TensorSpec([], tf.int64)
_VECTOR = tf.TensorSpec([None], tf.int64)

# TensorFlow never releases the Python functions that it calls: the arrays would stay in memory with their source.
_sources: weakref.WeakValueDictionary[int, ArraySource] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class ArraySource(Source):
    """This rank's rows of arrays that every rank has in memory as a whole.

    A step takes `batch_size * num_shards` consecutive samples of the epoch's order (`batch_size` when the
    batch is not scaled) and splits them into near-equal contiguous slices.

    Args:
        inputs: structure of dense, sparse or ragged tensors with `num_samples` rows each; `None` is kept.
        num_samples: int, the number of rows.
        batch_size: int, the user's batch size.
        plan: `Plan`.
        shuffle: `True` for a new order of all samples in each epoch, `"batch"` to shuffle within each step
            only, `False` for the given order.
        gather: optional callable that takes an `int64` vector of row numbers and returns the batch, for
            inputs that `tf.gather` does not take. It is traced into a graph.

    Raises:
        DataError: if there is no sample.
    """

    cardinality: int
    batch_size: int

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
        self.cardinality = num_samples
        self.batch_size = operator.index(batch_size)  # it may be NumPy's, and goes into checkpoints
        self._shuffle = shuffle
        self._gather = gather or row_gatherer(inputs)
        leaves = tf.nest.flatten(inputs)
        is_dense = gather is None and all(leaf is None or isinstance(leaf, tf.Tensor) for leaf in leaves)
        self._inputs = inputs if is_dense else None
        self._starts, self._stops, self._rows, self._global_rows = sharding.rows_of_steps(num_samples, batch_size, plan)
        self._sizes = self._stops - self._starts
        self._ends = np.cumsum(self._sizes)  # of the steps, in a vector of the rank's rows
        self._positions = np.arange(self._ends[-1]) + np.repeat(self._stops - self._ends, self._sizes)
        self._epoch = -1
        self._resumed_pass: int | None = None

    @property
    def num_steps(self) -> int:
        """The number of steps in a pass over the arrays."""
        return len(self._rows)

    def fingerprint(self) -> list[str]:
        """Returns the means of some rows."""
        rows = tf.nest.flatten(self._gather(tf.constant(sample_rows(self.cardinality))), expand_composites=True)
        return [row_means(np.asarray(leaf)) for leaf in rows if leaf is not None]

    def resume(self, epoch: int, pass_epoch: int | None, pass_step: int) -> None:
        """Resumes with the order of an interrupted pass: to skip steps of it costs almost nothing."""
        self._epoch, self._resumed_pass = epoch, pass_epoch

    def on_epoch_begin(self) -> None:
        """Moves on to the next epoch's order."""
        self._epoch += 1

    def dataset(self) -> tf.data.Dataset:
        """Returns the dataset of this rank's `Shard` elements."""
        return self._dataset

    @functools.cached_property
    def _dataset(self) -> tf.data.Dataset:
        steps = (self._ends - self._sizes, self._ends, self._rows, self._global_rows)
        # A static batch size spares compilers a dynamic shape; only ragged steps prevent it, on all ranks: Keras
        # weights what it means over steps by rows where it knows their number.
        size = int(self._sizes[0]) if (self._global_rows == self._global_rows[0]).all() else None
        if not self._shuffle and self.num_steps == 1:
            # One batch in one order, as in a loop of `predict`: there is nothing to call.
            rows = self._gather(tf.constant(self._positions))
            dataset = tf.data.Dataset.from_tensors(Shard(rows, self._rows[0], self._global_rows[0]))
        elif self._inputs is not None:
            dataset = _gathered(_steps_of_passes(self, steps), self._inputs, size)
        else:
            dataset = _gathered_by(_steps_of_passes(self, steps), self._gather, size)
        options = sharded_options()
        # As Keras does: the optimizer would serialise the arrays, and has nothing to optimize in this pipeline.
        options.experimental_optimization.apply_default_optimizations = False
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        options.deterministic = True
        options.autotune.enabled = False  # there is nothing to tune, see `untuned`
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.num_steps))
        return dataset.prefetch(2).with_options(options)

    def shard_indices(self) -> Any:
        """Returns the numbers of this rank's rows in a pass that begins in the current epoch."""
        epoch = max(self._epoch, 0) if self._resumed_pass is None else self._resumed_pass
        self._resumed_pass = None
        if self._shuffle == "batch":
            order = sharding.batchwise_order(self.cardinality, self.batch_size, self.plan, epoch)
        elif self._shuffle:
            order = sharding.epoch_order(self.cardinality, self.plan.seed, epoch)
        else:
            return self._positions
        return order[self._positions]


def _steps_of_passes(source: ArraySource, steps: Sequence[Any]) -> tf.data.Dataset:
    """Returns a dataset of the steps of a pass, each with the numbers of the pass's rows.

    Args:
        source: `ArraySource`, asked for its order at the beginning of each pass; it is not kept alive.
        steps: sequence of four `int64` arrays with an entry for each step: where its rows begin and end in the order,
            how many of them count here, and how many on all ranks.

    Returns:
        A dataset of `(start, stop, rows, global_rows, indices)`.
    """
    number = next(_numbers)
    _sources[number] = source
    numbers = tf.data.Dataset.from_tensors(tf.constant(number, tf.int64))
    passes = applied(map_op, numbers, _order_of_pass(), (), _VECTOR)
    element = (*[_SCALAR] * 4, _VECTOR)
    return applied(tf.raw_ops.FlatMapDataset, passes.prefetch(1), _steps_of_pass(), steps, element)


def _gathered(steps: tf.data.Dataset, inputs: Any, size: int | None) -> tf.data.Dataset:
    """Returns the dataset of `Shard` of dense tensors.

    Args:
        steps: dataset as `_steps_of_passes` returns it.
        inputs: structure of dense tensors and of `None`.
        size: int or `None`, the rows of each step, if known.
    """
    inputs = lists_to_tuples(inputs)
    tensors = [leaf for leaf in tf.nest.flatten(inputs) if leaf is not None]
    specs = tuple(tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in tensors)
    rows = iter([tf.TensorSpec([size, *spec.shape[1:]], spec.dtype) for spec in specs])
    data = tf.nest.map_structure(lambda leaf: _nothing() if leaf is None else next(rows), inputs)
    return applied(map_op, steps, _rows_of_step(specs, size), tensors, Shard(data, _SCALAR, _SCALAR))


def _gathered_by(steps: tf.data.Dataset, gather: Callable[[Any], Any], size: int | None) -> tf.data.Dataset:
    """Returns the dataset of `Shard` of what a function of the row numbers returns; see `_gathered`."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def draw(*step: Any) -> Shard:
        start, stop, rows, global_rows, indices = step
        return Shard(gather(_indices(indices, start, stop, size)), rows, global_rows)

    return steps.map(draw)


def _indices(indices: Any, start: Any, stop: Any, size: int | None) -> Any:
    indices = indices[start:stop]
    indices.set_shape([size])
    return indices


@functools.cache
def _nothing() -> Any:
    """Returns the spec that `tf.data` has for `None`."""
    return tf.data.Dataset.from_tensors((0, None)).element_spec[1]


@functools.cache
def _order_of_pass() -> Any:
    def of_number(number: Any) -> Any:
        return _sources[int(number)].shard_indices()

    def draw(number: Any) -> Any:
        indices = tf.numpy_function(of_number, [number], tf.int64)
        indices.set_shape([None])
        return indices

    return _traced(draw, _SCALAR)


@functools.cache
def _steps_of_pass() -> Any:
    def pair(indices: Any, *steps: Any) -> Any:
        every_step = tf.data.Dataset.from_tensors(indices).repeat()
        slices = tf.data.Dataset.from_tensor_slices(steps)
        return tf.data.experimental.to_variant(tf.data.Dataset.zip(slices, every_step))

    return _traced(pair, _VECTOR, *[_VECTOR] * 4)


@functools.lru_cache(maxsize=64)
def _rows_of_step(specs: tuple[tf.TensorSpec, ...], size: int | None) -> Any:
    def draw(start: Any, stop: Any, rows: Any, global_rows: Any, indices: Any, *tensors: Any) -> Any:
        indices = _indices(indices, start, stop, size)
        return [*(tf.gather(tensor, indices) for tensor in tensors), rows, global_rows]

    return _traced(draw, *[_SCALAR] * 4, _VECTOR, *specs)


def _traced(function: Callable[..., Any], *signature: Any) -> Any:
    with tf.init_scope():
        return traced(function, *signature)


def row_gatherer(inputs: Any) -> Callable[[Any], Any]:
    """Returns a function that gathers rows of every leaf of a structure of tensors."""
    leaves = tf.nest.flatten(inputs)
    # Entries of a sparse tensor are grouped by row once, so that a row is found without a search.
    grouped = [_entries_by_row(leaf) if isinstance(leaf, tf.SparseTensor) else leaf for leaf in leaves]

    def gather_leaf(leaf: Any, rows: Any, indices: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, tf.SparseTensor):
            columns, values = (tf.gather(part, indices) for part in rows)
            return _from_entries(columns, values, leaf.shape)
        return tf.gather(leaf, indices)

    def gather(indices: Any) -> Any:
        gathered = [gather_leaf(leaf, rows, indices) for leaf, rows in zip(leaves, grouped, strict=True)]
        return lists_to_tuples(tf.nest.pack_sequence_as(inputs, gathered))

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
