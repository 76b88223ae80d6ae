"""Global batches: N consecutive batches of the user's as one, which TensorFlow's strategy splits over N replicas."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.keras_hooks.fit.data_adapters import are_arrays

logger = logging.getLogger("kdist")

_DEFAULT_BATCH_SIZE = 32  # Keras' own


def with_global_batches(arguments: Mapping[str, Any], num_replicas: int) -> dict[str, Any] | None:
    """Returns the arguments of a `fit` that trains on global batches, `None` for data that Keras reads by itself.

    Args:
        arguments: mapping of the user's arguments by name. Validation data is left as it is.
        num_replicas: int, how many consecutive batches of the user's become one.
    """
    data = arguments.get("x")
    changed: dict[str, Any] = {}
    if isinstance(data, tf.data.Dataset):
        changed["x"] = global_dataset(data, num_replicas)
    elif isinstance(data, keras.utils.PyDataset):
        changed["x"] = GlobalPyDataset(data, num_replicas)
    elif isinstance(data, Iterator):
        logger.warning(
            "data: under this strategy Keras reads batches of a generator ahead before it trains, and drops them. Fix: "
            "a dataset, as by `tf.data.Dataset.from_generator`"
        )
        changed["x"] = _global_batches(data, num_replicas)
    elif not are_arrays(data, arguments.get("y"), arguments.get("sample_weight")):  # a `DataLoader`, say
        logger.warning(
            "batch: each batch of a %s is split over the %d replicas: the global batch does not grow",
            type(data).__name__, num_replicas,
        )  # fmt: skip
        return None
    else:
        # Keras takes it for the batch size of the validation as well.
        changed["batch_size"] = num_replicas * (arguments.get("batch_size") or _DEFAULT_BATCH_SIZE)
    if steps := arguments.get("steps_per_epoch"):
        changed["steps_per_epoch"] = -(-steps // num_replicas)
        if steps % num_replicas:
            logger.warning(
                "steps_per_epoch=%d is no multiple of the %d replicas: an epoch takes %d of your batches",
                steps, num_replicas, changed["steps_per_epoch"] * num_replicas,
            )  # fmt: skip
    return {**arguments, **changed}


def global_dataset(dataset: tf.data.Dataset, num_replicas: int) -> tf.data.Dataset:
    """Returns a dataset of global batches; the last may have fewer of the user's.

    Args:
        dataset: `tf.data.Dataset` of batches. Dense ones of several widths are padded with zeros, or empty texts.
        num_replicas: int, how many consecutive batches become one.
    """
    # As tf.data does, which passes a named tuple as one argument.
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

    return dataset.ragged_batch(num_replicas).map(flatten)


class GlobalPyDataset(keras.utils.PyDataset):
    """A `PyDataset` of global batches.

    Args:
        dataset: `keras.utils.PyDataset`, the user's.
        num_replicas: int, how many consecutive batches of it become one.
    """

    def __init__(self, dataset: keras.utils.PyDataset, num_replicas: int) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._num_replicas = num_replicas

    @property
    def num_batches(self) -> int | None:
        """The number of global batches; `None` if the user's dataset is endless."""
        total = self._dataset.num_batches
        return None if total is None else -(-total // self._num_replicas)

    def __getitem__(self, index: int) -> Any:
        start, total = index * self._num_replicas, self._dataset.num_batches
        stop = start + self._num_replicas if total is None else min(start + self._num_replicas, total)
        return _concatenated([self._dataset[each] for each in range(start, stop)])

    def on_epoch_begin(self) -> None:
        """Calls the user's."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Calls the user's."""
        self._dataset.on_epoch_end()


def _global_batches(batches: Iterator[Any], num_replicas: int) -> Iterator[Any]:
    while several := list(itertools.islice(batches, num_replicas)):
        yield _concatenated(several)


def _concatenated(batches: list[Any]) -> Any:
    """Returns one batch with the rows of several, in order; `None` leaves stay.

    Dense ones of several widths are padded with zeros, or empty texts. Features, the last of three axes or more, are
    not: one process would refuse them, and so does this.
    """

    def concatenate(*parts: Any) -> Any:
        if parts[0] is None:
            return None
        is_dense = all(isinstance(part, (tf.Tensor, np.ndarray)) for part in parts)
        may_pad = is_dense and len({len(part.shape) for part in parts}) == 1
        may_pad = may_pad and (len(parts[0].shape) < 3 or len({part.shape[-1] for part in parts}) == 1)
        if may_pad and len({tuple(part.shape[1:]) for part in parts}) > 1:
            if not any(map(tf.is_tensor, parts)):
                return _padded(parts)
            rows = [tf.RaggedTensor.from_tensor(part, ragged_rank=part.ndim - 1) for part in parts]
            padded = tf.concat(rows, 0).to_tensor()
            return padded if tf.is_tensor(parts[0]) else padded.numpy()
        return tf.concat(parts, 0) if tf.is_tensor(parts[0]) else np.concatenate(parts)

    return tf.nest.map_structure(concatenate, *batches) if len(batches) > 1 else batches[0]


def _padded(parts: tuple[np.ndarray[Any, Any], ...]) -> np.ndarray[Any, Any]:
    """Returns the rows of arrays, as wide as the widest; by NumPy, as Keras may have forked this process."""
    shape = np.max([part.shape[1:] for part in parts], axis=0)
    dtype = np.result_type(*parts)
    first = next((value for part in parts for value in part.flat), 0)
    empty: Any = type(first)() if dtype.hasobject else np.zeros((), dtype)
    rows = np.full((sum(map(len, parts)), *shape), empty, dtype)
    start = 0
    for part in parts:
        rows[(slice(start, start + len(part)), *map(slice, part.shape[1:]))] = part
        start += len(part)
    return rows
