"""From what Keras takes as input to this rank's share of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdist.data.arrays import ArraySource
from kdist.data.shard import Shard
from kdist.data.shard import split_batch as split_rows_of_batch
from kdist.data.sharding import Plan
from kdist.data.source import Source
from kdist.engines.engine import Engine
from kdist.errors import DataError
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
    plan = Plan(
        num_shards=engine.size,
        shard_id=engine.rank,
        scale_batch=scale_batch,
        seed=seed,
        steps_per_epoch=steps_per_epoch,
    )
    arrays = internals.array_parts(adapter)
    if arrays is not None:
        *parts, shuffle = arrays
        return ArraySource(*parts, plan, shuffle=shuffle)
    raise DataError(
        f"Input of this kind cannot be shared out among the ranks. Received: {type(adapter).__name__}. Expected arrays, a "
        "tf.data.Dataset, a PyDataset, a generator or a torch DataLoader. Fix: convert it to one of these."
    )


def split_batch(data: Any, engine: Engine) -> Shard:
    """Returns this rank's near-equal slice of the rows of one batch."""
    return split_rows_of_batch(data, engine.size, engine.rank)


def split_dataset(engine: Engine) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """Returns what splits each batch of a dataset for a custom training loop."""

    def split(dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset.map(lambda *batch: split_batch(batch if len(batch) > 1 else batch[0], engine).data)

    return split


def describe_source(source: Source) -> dict[str, Any]:
    """Returns what must be equal of a source on all ranks, as JSON values by name."""
    return {"kind": type(source).__name__, "signature": repr(source.signature), "number of steps": source.num_steps}


def draws_in_background(source: Source) -> bool:
    """Returns whether the user's code that makes the data runs ahead of training, in a thread of its own."""
    return False


def knows_global_rows(source: Source) -> bool:
    """Returns whether a rank knows the rows of all ranks in a step without asking them."""
    return not source.ends_by_agreement


def batch_to_build_on(source: Source) -> Any:
    """Returns a batch, or its signature where that tells all shapes, without taking one from an epoch."""
    signature = source.signature
    shapes = [leaf.shape for leaf in tf.nest.flatten(signature) if leaf is not None]
    if all(shape.rank is not None and shape[1:].is_fully_defined() for shape in shapes):
        return signature
    return source.example()
