"""N consecutive batches of the user's as one: what a strategy of TensorFlow's own then splits over its N replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def merge(batches: list[Any]) -> Any:
    """Returns one batch with the rows of several, in order.

    Args:
        batches: list of structures of arrays or tensors with a first axis of rows; `None` leaves stay.
    """

    def join(*parts: Any) -> Any:
        if parts[0] is None:
            return None
        return tf.concat(parts, 0) if tf.is_tensor(parts[0]) else np.concatenate(parts)

    return tf.nest.map_structure(join, *batches) if len(batches) > 1 else batches[0]


def merged_dataset(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
    """Returns a dataset whose batches are `count` consecutive ones of another; the last may be fewer.

    Args:
        dataset: `tf.data.Dataset` of batches. Dense ones of several widths are padded with zeros, or empty texts.
        count: int, how many become one.
    """
    # As tf.data does, which hands a named tuple over as one argument.
    spec = dataset.element_spec if type(dataset.element_spec) is tuple else (dataset.element_spec,)

    def rows(spec: tf.TypeSpec, part: tf.Tensor | tf.RaggedTensor) -> tf.Tensor | tf.RaggedTensor:
        if not isinstance(part, tf.RaggedTensor):
            return tf.reshape(part, tf.concat([[-1], tf.shape(part)[2:]], 0))
        merged = part.merge_dims(0, 1)
        was_dense = isinstance(spec, tf.TensorSpec) and isinstance(merged, tf.RaggedTensor)
        return merged.to_tensor(shape=[None, *spec.shape[1:]]) if was_dense else merged

    def flatten(*batches: Any) -> Any:
        merged = tf.nest.map_structure(rows, spec, batches)
        return merged[0] if len(merged) == 1 else merged

    return dataset.ragged_batch(count).map(flatten)


class MergedPyDataset(keras.utils.PyDataset):
    """A `PyDataset` whose batches are N consecutive ones of another.

    Args:
        dataset: `keras.utils.PyDataset`, the user's.
        count: int, how many become one.
    """

    def __init__(self, dataset: keras.utils.PyDataset, count: int) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._count = count

    @property
    def num_batches(self) -> int | None:
        """The number of merged batches; `None` if the user's are endless."""
        total = self._dataset.num_batches
        return None if total is None else -(-total // self._count)

    def __getitem__(self, index: int) -> Any:
        start, total = index * self._count, self._dataset.num_batches
        stop = start + self._count if total is None else min(start + self._count, total)
        return merge([self._dataset[each] for each in range(start, stop)])

    def on_epoch_begin(self) -> None:
        """Tells the user's."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tells the user's."""
        self._dataset.on_epoch_end()


def merged_batches(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """Yields N consecutive batches as one; the last may be fewer."""
    while several := list(itertools.islice(batches, count)):
        yield merge(several)
