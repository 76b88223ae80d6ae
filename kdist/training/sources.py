"""From what Keras takes as input to this rank's share of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdist.data.arrays import ArraySource
from kdist.data.generator import GeneratorSource
from kdist.data.own_stream import OwnStream
from kdist.data.py_dataset import PyDatasetSource, ShardedPyDataset
from kdist.data.shard import Shard, slice_rows
from kdist.data.shard import split_batch as split_rows_of_batch
from kdist.data.sharding import Plan
from kdist.data.source import Source
from kdist.data.tf_data import tf_data_source
from kdist.engines.engine import Engine
from kdist.errors import DataError
from kdist.strategies.all_reduce import shared_out_already
from kdist.training import _keras_internals as internals


def make_source(
    adapter: Any,
    engine: Engine,
    *,
    scale_batch: bool,
    auto_shard: bool,
    seed: int,
    steps_per_epoch: int | None,
) -> Source:
    """Makes this rank's source of what one of Keras' data adapters holds.

    Args:
        adapter: Keras' `DataAdapter`, which has checked and standardised the user's input.
        engine: `Engine`, for rank and size.
        scale_batch: bool, whether each rank takes a whole batch of the user's.
        auto_shard: bool, whether the input is shared out; if not, each rank's is its own.
        seed: int, the base of all orders, the same on all ranks.
        steps_per_epoch: int or `None`, the user's own batches in an epoch.

    Raises:
        DataError: if the input cannot be shared out.
    """
    job = Plan(
        num_shards=engine.size,
        shard_id=engine.rank,
        scale_batch=scale_batch,
        seed=seed,
        steps_per_epoch=steps_per_epoch,
    )
    dataset = internals.tf_dataset(adapter)
    if dataset is not None:
        return tf_data_source(dataset, job, auto_shard=auto_shard)
    if auto_shard:
        return _source(adapter, job)
    return OwnStream(_source(adapter, job.alone()), job)


def _source(adapter: Any, plan: Plan) -> Source:
    """Makes the source of what comes through Python."""
    if arrays := internals.array_parts(adapter):
        inputs, num_samples, batch_size, shuffle = arrays
        return ArraySource(inputs, num_samples, batch_size, plan, shuffle=shuffle)
    if py_dataset := internals.py_dataset_parts(adapter):
        sharded = ShardedPyDataset(
            py_dataset.dataset, plan, shuffle=py_dataset.shuffle, standardize=py_dataset.standardize
        )
        return PyDatasetSource(sharded, internals.PyDatasetAdapter(sharded))
    if iterable := internals.iterable_parts(adapter):
        return GeneratorSource(iterable.batches, plan, **iterable.known)
    raise DataError(
        f"Input of this kind cannot be shared out among the ranks. Received: {type(adapter).__name__}. Expected "
        "arrays, a tf.data.Dataset, a PyDataset, a generator or a torch DataLoader. Fix: convert it to one of these."
    )


def split_batch(data: Any, engine: Engine) -> Shard:
    """Returns this rank's near-equal slice of the rows of one batch."""
    return split_rows_of_batch(data, engine.size, engine.rank)


def split_dataset(engine: Engine) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """Returns what splits each batch of a dataset for a custom training loop."""

    def rows_that_count(shard: Shard) -> Any:
        # A user's own step knows of no weight: a rank without a row gets none, as under TensorFlow's strategies.
        return slice_rows(shard.data, 0, shard.rows)

    def split(dataset: tf.data.Dataset) -> tf.data.Dataset:
        plan = Plan(num_shards=engine.size, shard_id=engine.rank, scale_batch=False)
        own = tf_data_source(dataset, plan).dataset().map(rows_that_count)
        return own.with_options(shared_out_already())

    return split


def describe_source(source: Source) -> dict[str, Any]:
    """Returns what must be equal of a source on all ranks, as JSON values by name."""
    return {
        "kind": type(source).__name__,
        "signature": repr(source.signature),
        "number of samples or batches": source.extent,
        "number of steps": source.num_steps,
        # An unseeded split or shuffle before the scope gives each rank other rows of the same shape.
        "seeds and means of some rows": source.glimpse(),
    }


def holds_random_state(source: Source) -> bool:
    """Returns whether Python's and NumPy's random states must be left alone while a source is in use.

    A generator draws its order from them in a thread of its own, ahead of training: every rank draws the same as long
    as nobody else does.
    """
    return source.draws_in_background and not isinstance(source, PyDatasetSource)


def has_fixed_shapes(source: Source) -> bool:
    """Returns whether all batches have the same shape but for the number of rows."""
    shapes = [leaf.shape for leaf in tf.nest.flatten(source.signature) if leaf is not None]
    return all(shape.rank is not None and shape[1:].is_fully_defined() for shape in shapes)


def batch_to_build_on(source: Source, model: keras.Model) -> Any:
    """Returns a batch, or its signature where that tells enough, without taking one from an epoch.

    Args:
        source: `Source`.
        model: `keras.Model` that is to be built. If its weights are there, losses and metrics do without lengths, and
            if all is there nothing is needed.
    """
    has_weights, has_losses = internals.is_built(model)
    if has_weights and has_losses:
        return None
    ranks_are_known = all(leaf.shape.rank is not None for leaf in tf.nest.flatten(source.signature) if leaf is not None)
    if has_fixed_shapes(source) or (has_weights and ranks_are_known):
        return source.signature
    return source.example()
