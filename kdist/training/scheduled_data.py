"""How batches reach the workers: as tensors, or as rows of arrays that each worker is sent once."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist.data.arrays import ArraySource, row_gatherer
from kdist.data.shard import Shard, batch_signature
from kdist.data.sharding import Plan
from kdist.data.source import Source
from kdist.engines.engine import Engine
from kdist.strategies.dispatch import Resident
from kdist.training import _keras_internals as internals
from kdist.training.epoch_iterator import SourceAdapter
from kdist.training.sources import batch_to_build_on, make_source

# A message of TensorFlow's is smaller than this.
_MAX_BYTES_OF_ARRAY = (1 << 31) - (1 << 20)


class Feed:
    """Batches as what is sent to a worker, and how the worker makes a batch of that again.

    Args:
        source: `Source` of the user's batches, or of the row numbers of each.
        arrays: structure of tensors whose rows the source numbers, or `None`.
        build_on: `Source` of the user's batches, what a model is built on.
    """

    def __init__(self, source: Source, arrays: Any = None, build_on: Source | None = None) -> None:
        self.source = source
        self._build_on = build_on or source
        self._arrays = arrays
        self.resident = None if arrays is None else Resident(tf.nest.flatten(arrays, expand_composites=True))
        self.packing = Packing(source.signature)

    def batch_to_build_on(self, model: keras.Model) -> Any:
        """Returns what a model is built on: a batch of the user's, its signature, or nothing."""
        return batch_to_build_on(self._build_on, model)

    @functools.cached_property
    def resident_specs(self) -> list[tf.TensorSpec]:
        """The specs of the tensors that stay on the workers: dense ones of any number of rows."""
        specs = []
        for leaf in [] if self._arrays is None else tf.nest.flatten(self._arrays):
            is_dense = not isinstance(leaf, tf.RaggedTensor)
            for part in tf.nest.flatten(leaf, expand_composites=True):
                specs.append(tf.TensorSpec([None, *part.shape[1:]] if is_dense else part.shape, part.dtype))
        return specs

    @functools.cached_property
    def kind(self) -> str:
        """What a function is made for that takes these batches: another kind needs another one."""
        arrays = tf.nest.map_structure(lambda leaf: type(leaf).__name__, self._arrays)
        return repr((self.packing.signature, arrays, self.resident_specs))

    def restored(self, kept: list[tf.Tensor], sent: Any) -> Any:
        """Returns the user's batch, in the graph that a worker runs."""
        if self._arrays is None:
            return sent
        return row_gatherer(tf.nest.pack_sequence_as(self._arrays, kept, expand_composites=True))(sent)


class Packing:
    """A structure of tensors as a flat list, and back.

    Args:
        signature: structure of tensor specs, with an unknown batch dimension.

    Attributes:
        signature: that structure, with `None` for what is nothing.
        specs: list of the specs of the flat list.
    """

    def __init__(self, signature: Any) -> None:
        self.signature = tf.nest.map_structure(lambda leaf: None if _is_nothing(leaf) else leaf, signature)
        self.specs = [leaf for leaf in tf.nest.flatten(self.signature, expand_composites=True) if leaf is not None]

    def flat(self, data: Any) -> list[tf.Tensor]:
        """Returns the tensors of a batch."""
        data = tf.nest.map_structure(lambda leaf: None if _is_nothing(leaf) else leaf, data)
        return [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None]

    def packed(self, flat: Iterable[tf.Tensor]) -> Any:
        """Returns the batch of which these are the tensors."""
        rest = iter(flat)
        leaves = tf.nest.flatten(self.signature, expand_composites=True)
        filled = [None if leaf is None else next(rest) for leaf in leaves]
        return tf.nest.pack_sequence_as(self.signature, filled, expand_composites=True)


def _is_nothing(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (tf.experimental.Optional, tf.OptionalSpec))


def make_feed(adapter: Any, *, seed: int, steps_per_epoch: int | None, one_process: Engine) -> Feed:
    """Makes the feed of what one of Keras' data adapters holds.

    Args:
        adapter: Keras' `DataAdapter`.
        seed: int, the base of all orders.
        steps_per_epoch: int or `None`, the user's own batches in an epoch.
        one_process: the engine of one process, for the chief alone has the data.
    """
    arrays = internals.array_parts(adapter)
    if arrays is None or not _stay_well(arrays[0]):
        return Feed(
            make_source(
                adapter, one_process, scale_batch=True, auto_shard=True, seed=seed, steps_per_epoch=steps_per_epoch
            )
        )
    inputs, num_samples, batch_size, shuffle = arrays
    plan = Plan(seed=seed, steps_per_epoch=steps_per_epoch)
    whole = ArraySource(inputs, num_samples, batch_size, plan, shuffle=shuffle)
    rows = ArraySource(None, num_samples, batch_size, plan, shuffle=shuffle, gather=lambda indices: indices)
    return Feed(rows, inputs, whole)


def _stay_well(inputs: Any) -> bool:
    """Returns whether arrays can be sent to each worker as they are."""
    leaves = tf.nest.flatten(inputs)
    return not any(
        leaf is None or isinstance(leaf, tf.SparseTensor) or leaf.dtype == tf.string for leaf in leaves
    ) and all(
        part.dtype.size * part.shape.num_elements() < _MAX_BYTES_OF_ARRAY
        for part in tf.nest.flatten(inputs, expand_composites=True)
    )


class Batches:
    """An iteration over a feed's batches, as flat lists of tensors.

    Args:
        feed: `Feed`.
        shards: iterable of `Shard`.
    """

    def __init__(self, feed: Feed, shards: Iterable[Shard]) -> None:
        self.feed = feed
        self._shards = iter(shards)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> list[tf.Tensor]:
        return self.feed.packing.flat(next(self._shards).data)

    def take(self, count: int) -> list[list[tf.Tensor]]:
        """Returns the next batches.

        Args:
            count: int, how many; there may be fewer left.

        Raises:
            StopIteration: if there is none left.
        """
        taken = list(itertools.islice(self, count))
        if not taken:
            raise StopIteration
        return taken


class OneBatch(Source):
    """A batch of the user's by itself, as `train_on_batch` is given.

    Args:
        data: structure of tensors; `None` is kept.
    """

    def __init__(self, data: Any) -> None:
        self.plan = Plan()
        self.data = tf.nest.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), data)

    def dataset(self) -> tf.data.Dataset:
        """Returns the dataset of the one batch."""
        return tf.data.Dataset.from_tensors(Shard(self.data, 0, 0))

    @property
    def num_steps(self) -> int:
        """One."""
        return 1

    @property
    def signature(self) -> Any:
        """Structure of specs of the batch."""
        specs = tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype), self.data
        )
        return batch_signature(specs)


class ScheduledEpochIterator(internals.TFEpochIterator):
    """Keras' iterator over an epoch, which gives the chief what it sends.

    Args:
        feed: `Feed`.
        steps_per_epoch: int or `None`, steps of an epoch if the user gave their number.
        steps_per_execution: int, steps a call of the training function makes.
        begin_pass: callable, runs before the first step of a pass.
        end_pass: callable, runs after the last step of a pass was scheduled.
        wrap: callable, makes of the `Batches` what Keras hands to its functions.
    """

    def __init__(
        self,
        feed: Feed,
        *,
        steps_per_epoch: int | None,
        steps_per_execution: int,
        begin_pass: Callable[[], None],
        end_pass: Callable[[], None],
        wrap: Callable[[Batches], Any],
    ) -> None:
        self.feed = feed
        self._adapter = SourceAdapter(feed.source, lambda: None)
        internals.EpochIterator.__init__(
            self, self._adapter, steps_per_epoch=steps_per_epoch, steps_per_execution=steps_per_execution
        )
        # Once: each function in a dataset is told to every worker and ps.
        self._dataset = self._adapter.get_tf_dataset()
        self._begin_pass = begin_pass
        self._end_pass = end_pass
        self._wrap = wrap

    def _get_iterator(self) -> Any:
        return self._wrap(Batches(self.feed, self._dataset))

    def __iter__(self) -> ScheduledEpochIterator:
        """Begins a pass."""
        self._begin_pass()
        return super().__iter__()

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Ends the pass when the loop inside is through; not when it raises."""
        with super().catch_stop_iteration():
            yield
        self._end_pass()
