"""How batches travel to the workers: as tensors, or as row numbers of arrays of which each worker holds a copy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kdist.data.arrays import ArraySource, row_gatherer
from kdist.data.batch import batch_signature
from kdist.data.make_source import batch_to_build_on, make_source
from kdist.data.sharding import Plan
from kdist.data.source import Source
from kdist.engines.single import SingleEngine
from kdist.keras_hooks.fit.data_adapters import array_parts
from kdist.keras_hooks.fit.fit_loop import PassIterator
from kdist.parameter_server.dispatch import PerWorkerTensors
from kdist.trainer.feeding.source_adapter import SourceAdapter

# A message of TensorFlow's is smaller than this.
_MAX_BYTES_OF_ARRAY = (1 << 31) - (1 << 20)


class Feed:
    """Makes of a batch the tensors that are sent to a worker, and of these the batch again.

    Args:
        signature: structure of tensor specs of what is sent, with an unknown batch dimension.
        arrays: structure of tensors whose row numbers are sent, or `None` where batches are.

    Attributes:
        per_worker: `PerWorkerTensors` of these arrays, or `None`.
        specs: list of the specs of the tensors that are sent for a batch.
    """

    def __init__(self, signature: Any, arrays: Any = None) -> None:
        self._arrays = arrays
        self._signature = _without_nothing(signature)
        self.per_worker = None if arrays is None else PerWorkerTensors(tf.nest.flatten(arrays, expand_composites=True))
        self.specs = _leaves(self._signature)

    @functools.cached_property
    def per_worker_specs(self) -> list[tf.TensorSpec]:
        """The specs of the tensors of which each worker holds a copy: dense ones of any number of rows."""
        specs = []
        for leaf in [] if self._arrays is None else tf.nest.flatten(self._arrays):
            is_dense = not isinstance(leaf, tf.RaggedTensor)
            for part in tf.nest.flatten(leaf, expand_composites=True):
                specs.append(tf.TensorSpec([None, *part.shape[1:]] if is_dense else part.shape, part.dtype))
        return specs

    @functools.cached_property
    def kind(self) -> str:
        """What a function on these batches is traced for: equal for all feeds that it can take batches of."""
        arrays = tf.nest.map_structure(lambda leaf: type(leaf).__name__, self._arrays)
        return repr((self._signature, arrays, self.per_worker_specs))

    def tensors(self, data: Any) -> list[tf.Tensor]:
        """Returns the tensors that are sent for a batch."""
        return _leaves(_without_nothing(data))

    def batch(self, copies: list[tf.Tensor], sent: Iterable[tf.Tensor]) -> Any:
        """Returns the user's batch, in the graph that a worker runs.

        Args:
            copies: list of tensors, the worker's copies of the arrays.
            sent: iterable of tensors, what `tensors` has made of the batch.
        """
        rest = iter(sent)
        leaves = tf.nest.flatten(self._signature, expand_composites=True)
        filled = [None if leaf is None else next(rest) for leaf in leaves]
        data = tf.nest.pack_sequence_as(self._signature, filled, expand_composites=True)
        if self._arrays is None:
            return data
        return row_gatherer(tf.nest.pack_sequence_as(self._arrays, copies, expand_composites=True))(data)


def _leaves(structure: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(structure, expand_composites=True) if leaf is not None]


def _without_nothing(structure: Any) -> Any:
    nothing = (tf.experimental.Optional, tf.OptionalSpec)  # what tf.data may have in the place of `None`
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, nothing) else leaf, structure)


class WorkerBatch(NamedTuple):
    """A batch as it is sent to a worker: its feed and its tensors."""

    feed: Feed
    tensors: list[tf.Tensor]


def single_batch(data: Any) -> WorkerBatch:
    """Returns one batch of the user's, as `train_on_batch` gets it, as it is sent."""
    data = tf.nest.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), data)
    specs = tf.nest.map_structure(lambda leaf: None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype), data)
    feed = Feed(batch_signature(specs))
    return WorkerBatch(feed, feed.tensors(data))


class WorkerEpochIterator(PassIterator):
    """Keras' iterator over an epoch on the chief, which yields what is sent to workers.

    Args:
        feed: `Feed`.
        source: `Source` of what is sent.
        example_source: `Source` of the user's batches, on which a model is built.
        iterate: callable, makes of an iterator of `WorkerBatch` the one that Keras passes to the model's functions.
        **others: the other arguments of `PassIterator`.
    """

    def __init__(
        self,
        feed: Feed,
        source: Source,
        example_source: Source,
        *,
        iterate: Callable[[Iterator[WorkerBatch]], Any],
        **others: Any,
    ) -> None:
        super().__init__(SourceAdapter(source, lambda: None), **others)
        self._feed = feed
        self._example_source = example_source
        self._iterate = iterate

    def batch_to_build_on(self, model: keras.Model) -> Any:
        """Returns what a model is built on: a batch of the user's, its signature, or nothing."""
        return batch_to_build_on(self._example_source, model)

    def make_iterator(self) -> Any:
        """Returns the iterator that Keras passes to the model's functions."""
        feed, shards = self._feed, self.dataset
        return self._iterate(WorkerBatch(feed, feed.tensors(shard.data)) for shard in shards)


def make_iterator(adapter: Any, *, seed: int, steps_per_epoch: int | None, **others: Any) -> WorkerEpochIterator:
    """Returns the iterator over what one of Keras' data adapters holds.

    Args:
        adapter: Keras' `DataAdapter`.
        seed: int, the base of all orders.
        steps_per_epoch: int or `None`, the user's own batches in an epoch.
        **others: the other arguments of `WorkerEpochIterator`.
    """
    arrays = array_parts(adapter)
    if arrays is None or not _can_be_copied(tf.nest.flatten(arrays[0])):
        # The chief alone reads the data.
        source = make_source(
            adapter, SingleEngine(), scale_batch=True, auto_shard=True, seed=seed, steps_per_epoch=steps_per_epoch
        )
        feed, example_source = Feed(source.signature), source
    else:
        inputs, num_samples, batch_size, shuffle = arrays
        plan = Plan(seed=seed, steps_per_epoch=steps_per_epoch)
        source = ArraySource(None, num_samples, batch_size, plan, shuffle=shuffle, gather=lambda indices: indices)
        feed = Feed(source.signature, inputs)
        example_source = ArraySource(inputs, num_samples, batch_size, plan, shuffle=shuffle)
    return WorkerEpochIterator(feed, source, example_source, steps_per_epoch=steps_per_epoch, **others)


def _can_be_copied(inputs: Sequence[Any]) -> bool:
    """Returns whether each worker can be sent a copy of these arrays."""
    if any(leaf is None or isinstance(leaf, tf.SparseTensor) or leaf.dtype == tf.string for leaf in inputs):
        return False
    parts = tf.nest.flatten(inputs, expand_composites=True)
    return all(part.dtype.size * part.shape.num_elements() < _MAX_BYTES_OF_ARRAY for part in parts)
