"""A rank's rows of one step, and functions of batches: to count, slice and split their rows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import tensorflow as tf

from kdist.data.sharding import split_rows
from kdist.errors import DataError


class Shard(NamedTuple):
    """One rank's rows of one step.

    Attributes:
        data: the user's structure (`x`, `(x, y)`, `(x, y, sample_weight)`, ...) with this rank's rows.
        rows: `int64` scalar, the number of this rank's rows. It is 0 on a rank without data in this step; `data` is
            then one padding row, with weight 0.
        global_rows: `int64` scalar, the rows of all ranks in this step. A source sets -1 where only a message tells: a
            step is then given `()`, and sums `rows`.
    """

    data: Any
    rows: Any
    global_rows: Any


def int64(value: Any) -> Any:
    """Returns `value` as an `int64` tensor."""
    return tf.cast(value, tf.int64)


def slice_or_first(total: Any, num_shards: int, shard_id: Any) -> tuple[Any, Any, Any]:
    """Returns a shard's near-equal slice of some rows, or the first of them where that is empty.

    Args:
        total: `int64` scalar tensor, the number of rows.
        num_shards: int, the number of slices.
        shard_id: int or `int64` scalar tensor, which slice.

    Returns:
        `(start, stop, rows)`, `int64` scalar tensors; `rows` is 0 where the slice is empty.
    """
    start, stop = split_rows(total, num_shards, int64(shard_id))
    rows = stop - start
    start = tf.where(rows > 0, start, 0)
    return start, start + tf.maximum(rows, 1), rows


class Rows:
    """The rows of a batch: which leaves have them, how many there are, and slices of them.

    The leaves of most batches share their first dimension. Where they do not, a leaf whose first dimension is known has
    no rows beside leaves for which it is unknown, as in `{"anchors": (3, 5), "x": (None, 5)}`, nor has one that differs
    from the size of the pipeline's batches. Any other batch, as of a graph's nodes and edges, cannot be sliced.

    Args:
        structure: structure of arrays, tensors or specs: `x`, `(x, y)`, `(x, y, sample_weight)`, ...; `None` and
            scalars have no rows.
        batch_sizes: collection of int, the sizes of the batches that the user's pipeline makes.

    Attributes:
        size: int or `None`, the number of rows if it is known.
    """

    def __init__(self, structure: Any, batch_sizes: Collection[int] = ()) -> None:
        leaves = tf.nest.flatten(structure)
        sizes = {number: _first_dimension(leaf) for number, leaf in enumerate(leaves) if _has_dimensions(leaf)}
        has_targets = isinstance(structure, (list, tuple)) and not hasattr(structure, "_fields") and len(structure) > 1
        num_inputs = len(tf.nest.flatten(structure[0])) if has_targets else len(leaves)
        inputs = {number for number in sizes if number < num_inputs}
        targets = sizes.keys() - inputs
        found = [sizes[number] for number in sorted(targets or inputs)]
        self.size = (
            None if None in found else max(found, key=lambda size: (size in batch_sizes, found.count(size)), default=1)
        )
        with_rows = [number for number, size in sizes.items() if size in (None, self.size)]
        is_told = None in sizes.values() or self.size in batch_sizes
        is_plausible = targets <= set(with_rows) and not (inputs and inputs.isdisjoint(with_rows))
        # `None`: it is not known which leaves have rows.
        self._sliced = with_rows if len(set(sizes.values())) <= 1 or (is_told and is_plausible) else None
        self._counted = next((number for number in with_rows if number in targets), next(iter(with_rows), None))
        self._sizes = list(sizes.values())
        self._open = {number for number, size in sizes.items() if size is None}
        # As of a graph's nodes and edges, with one target.
        self._may_differ = len(with_rows) > 1 and None in (sizes[number] for number in with_rows)

    def has_rows(self, number: int) -> bool:
        """Returns whether a leaf has rows, as far as is known; `number` is its place in the flat structure."""
        return self._sliced is None or number in self._sliced

    def probably_has_rows(self, number: int) -> bool:
        """Returns whether a leaf has rows; where that is not known, one of a known length has none beside others."""
        return self.has_rows(number) and (self._sliced is not None or not self._open or number in self._open)

    def count(self, batch: Any) -> Any:
        """Returns the number of rows of a batch: an int if it is known from the structure, or an `int64` scalar."""
        return _length(tf.nest.flatten(batch)[self._counted]) if self.size is None else self.size

    def count_equal(self, batch: Any) -> Any:
        """Returns the number of rows of a batch, an `int64` scalar; an op fails where its leaves differ in it."""
        total = int64(self.count(batch))
        if self._sliced is None or not self._may_differ:
            return total
        lengths = self._lengths(batch)
        check = tf.debugging.Assert(tf.reduce_all(lengths == total), [_OTHER_ROWS.format("the numbers below"), lengths])
        with tf.control_dependencies([check]):
            return tf.identity(total)

    def slice(self, batch: Any, start: Any, stop: Any) -> Any:
        """Returns the rows `start:stop` of a batch; leaves without rows are kept whole.

        Args:
            batch: structure of arrays or tensors.
            start: int or `int64` scalar tensor.
            stop: int or `int64` scalar tensor.

        Raises:
            DataError: if it is not known which leaves have rows.
        """
        if self._sliced is None:
            raise DataError(_OTHER_ROWS.format(self._sizes))
        leaves = tf.nest.flatten(batch)
        for number in self._sliced:
            leaves[number] = _slice(leaves[number], start, stop)
        return tf.nest.pack_sequence_as(batch, leaves)

    def head(self, batch: Any, stop: Any) -> Any:
        """Returns the first `stop` rows of a batch; the whole batch if its leaves differ in their numbers of rows."""
        if self._sliced is None:
            return batch
        if self._may_differ:
            lengths = self._lengths(batch)
            stop = tf.where(tf.reduce_all(lengths == lengths[0]), int64(stop), tf.reduce_max(lengths))
        return self.slice(batch, 0, stop)

    def split(self, batch: Any, num_shards: int, shard_id: Any) -> Shard:
        """Returns a shard's near-equal slice of the rows of a batch.

        Args:
            batch: structure of tensors.
            num_shards: int, the number of slices.
            shard_id: int or `int64` scalar tensor, which slice.

        Returns:
            A `Shard`; where the slice is empty, its data is the batch's first row.

        Raises:
            DataError: if it is not known which leaves have rows.
        """
        total = self.count_equal(batch)
        start, stop, rows = slice_or_first(total, num_shards, shard_id)
        return Shard(self.slice(batch, start, stop), rows, total)

    def split_eagerly(self, batch: Any, num_shards: int, shard_id: int) -> Shard:
        """Returns what `split` does of arrays or eager tensors, with ints: no operation of TensorFlow's counts.

        Args:
            batch: structure of arrays or tensors.
            num_shards: int, the number of slices.
            shard_id: int, which slice.

        Raises:
            DataError: if it is not known which leaves have rows.
        """
        total = int(self.count(batch))
        start, stop = split_rows(total, num_shards, shard_id)
        return Shard(self.slice(batch, *((start, stop) if stop > start else (0, 1))), stop - start, total)

    def _lengths(self, batch: Any) -> Any:
        leaves = tf.nest.flatten(batch)
        return tf.stack([_length(leaves[number]) for number in self._sliced or ()])


_OTHER_ROWS = (
    "A batch cannot be split over the ranks: its parts have different first dimensions. Received: {}. Expected: one "
    "number of rows, the samples, in all of them, as in a batch of padded or ragged graphs. Fix: give each part a "
    "first axis for the samples; or, in a tf.data pipeline, declare a part without samples by a known first dimension, "
    "and that of the others as unknown (`None`); or call fit with scale_batch=True, by which ranks take whole batches."
)


def _has_dimensions(leaf: Any) -> bool:
    shape = getattr(leaf, "shape", None)
    return shape is not None and (shape.rank if isinstance(shape, tf.TensorShape) else len(shape)) != 0


def _first_dimension(leaf: Any) -> int | None:
    shape = leaf.shape
    return None if isinstance(shape, tf.TensorShape) and shape.rank is None else shape[0]


def _length(leaf: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return int64(leaf.nrows()) if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf, out_type=tf.int64)[0]


def _slice(leaf: Any, start: Any, stop: Any) -> Any:
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:stop]
    rest = leaf.dense_shape[1:]
    begin = tf.concat([int64([start]), tf.zeros_like(rest)], 0)
    return tf.sparse.slice(leaf, begin, tf.concat([int64([stop - start]), rest], 0))


def batch_signature(spec: Any, batch_sizes: Collection[int] = ()) -> Any:
    """Returns a structure of tensor specs with an unknown batch dimension, and `None` for what is no tensor.

    Args:
        spec: structure of specs of a batch.
        batch_sizes: see `Rows`.
    """
    rows = Rows(spec, batch_sizes)

    def relax(number: int, leaf: Any) -> Any:
        shape = getattr(leaf, "shape", None)
        if shape is None:
            return None  # tf.data has a spec of its own for `None`, and Keras an optional without a value
        if shape.rank in (None, 0) or not rows.has_rows(number):
            return leaf
        shape = tf.TensorShape([None]).concatenate(shape[1:])
        if isinstance(leaf, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits_dtype)
        if isinstance(leaf, tf.SparseTensorSpec):
            return tf.SparseTensorSpec(shape, leaf.dtype)
        return tf.TensorSpec(shape, leaf.dtype) if isinstance(leaf, tf.TensorSpec) else leaf

    leaves = [relax(number, leaf) for number, leaf in enumerate(tf.nest.flatten(spec))]
    return tf.nest.pack_sequence_as(spec, leaves)


def lists_to_tuples(structure: Any) -> Any:
    """Returns a structure with tuples in the place of lists, which `tf.data` converts to tensors."""
    if isinstance(structure, list | tuple) and not hasattr(structure, "_fields"):
        return tuple(lists_to_tuples(item) for item in structure)
    if isinstance(structure, dict):
        return {key: lists_to_tuples(value) for key, value in structure.items()}
    return structure


def zero_row(signature: Any) -> Any:
    """Returns one row of zeros (empty strings) for a signature; unknown dimensions have size 1."""

    def zeros(leaf: Any) -> Any:
        if isinstance(leaf, tf.RaggedTensorSpec):
            values = tf.zeros([0, *_sizes(leaf.shape[leaf.ragged_rank + 1 :])], leaf.dtype)
            for depth in reversed(range(leaf.ragged_rank)):
                splits = tf.constant([0, 0] if depth == 0 else [0], leaf.row_splits_dtype)
                values = tf.RaggedTensor.from_row_splits(values, splits)
            return values
        if isinstance(leaf, tf.SparseTensorSpec):
            shape = _sizes(leaf.shape)
            return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], leaf.dtype), shape)
        if isinstance(leaf, tf.TensorSpec):
            return tf.zeros(_sizes(leaf.shape) if leaf.shape.rank is not None else [1], leaf.dtype)
        return None

    return tf.nest.map_structure(zeros, signature)


def _sizes(shape: Any) -> list[int]:
    return [1 if size is None else size for size in shape]
