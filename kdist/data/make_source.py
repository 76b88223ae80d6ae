"""Makes this rank's source of what Keras takes as input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kdist.data.arrays import ArraySource
from kdist.data.batch import Rows
from kdist.data.generator import GeneratorSource
from kdist.data.graphs.fingerprint import is_of_seeds
from kdist.data.graphs.options import sharded_options
from kdist.data.per_rank_stream import PerRankStream
from kdist.data.pipelines.pipeline import nondeterministic_parts
from kdist.data.pipelines.seeds import PipelineSeeds
from kdist.data.py_dataset import PyDatasetSource, ShardedPyDataset
from kdist.data.sharding import Plan
from kdist.data.source import Source
from kdist.data.tf_data import tf_data_source
from kdist.engines.engine import Engine
from kdist.errors import DataError, MismatchError
from kdist.keras_hooks.fit.data_adapters import array_parts, iterable_parts, py_dataset_parts, tf_dataset
from kdist.keras_hooks.trainer import is_built

_ROWS, _SEEDS = "means of some rows", "seeds"


def make_source(
    adapter: Any,
    engine: Engine,
    *,
    scale_batch: bool,
    auto_shard: bool,
    seed: int,
    steps_per_epoch: int | None,
    micro_batches: int | None = None,
) -> Source:
    """Makes this rank's source of what one of Keras' data adapters holds.

    Args:
        adapter: Keras' `DataAdapter`, which has checked and standardised the user's input.
        engine: `Engine`, for rank and size.
        scale_batch: bool, whether each rank takes a whole batch of the user's.
        auto_shard: bool, whether kdist shards the input; if not, it is this rank's shard already.
        seed: int, the base of all orders, the same on all ranks.
        steps_per_epoch: int or `None`, the user's own batches in an epoch.
        micro_batches: int or `None`, the user's own batches in a step, whatever the number of ranks.

    Raises:
        DataError: if the input cannot be sharded.
    """
    job = Plan(
        num_shards=engine.size,
        shard_id=engine.rank,
        scale_batch=scale_batch,
        seed=seed,
        steps_per_epoch=steps_per_epoch,
        micro_batches=micro_batches,
    )
    dataset = tf_dataset(adapter)
    if dataset is not None:
        return tf_data_source(dataset, job, auto_shard=auto_shard)
    if auto_shard:
        return _source(adapter, job)
    return PerRankStream(_source(adapter, job.unsharded()), job)


def _source(adapter: Any, plan: Plan) -> Source:
    """Makes the source of any input but a `tf.data.Dataset`."""
    if arrays := array_parts(adapter):
        inputs, num_samples, batch_size, shuffle = arrays
        return ArraySource(inputs, num_samples, batch_size, plan, shuffle=shuffle)
    if py_dataset := py_dataset_parts(adapter):
        sharded = ShardedPyDataset(
            py_dataset.dataset, plan, shuffle=py_dataset.shuffle, standardize=py_dataset.standardize
        )
        return PyDatasetSource(sharded)
    if iterable := iterable_parts(adapter):
        return GeneratorSource(iterable.batches, plan, **iterable.known)
    raise DataError(
        f"Input of this kind cannot be sharded among the ranks. Received: {type(adapter).__name__}. Expected: "
        "arrays, a tf.data.Dataset, a PyDataset, a generator, a torch DataLoader or a Grain dataset. Fix: convert it "
        "to one of these."
    )


def split_dataset(engine: Engine, seed: int) -> Callable[..., tf.data.Dataset]:
    """Returns a function that splits each batch of a dataset, for a custom training loop.

    It takes the dataset, and as `auto_shard` whether each rank has the same data. Each call gives unseeded shuffles
    another order, as the iterations of one process have: every rank must make as many for pipelines like it.

    Args:
        engine: `Engine`, for rank and size.
        seed: int, equal on all ranks.
    """
    seeds = PipelineSeeds(seed)

    def split(dataset: tf.data.Dataset, *, auto_shard: bool) -> tf.data.Dataset:
        order = seeds.next(" ".join(nondeterministic_parts(dataset)))
        plan = Plan(num_shards=engine.size, shard_id=engine.rank, scale_batch=False, seed=order)
        source = tf_data_source(dataset, plan, auto_shard=auto_shard)
        rows = Rows(source.signature)
        # A user's own step has no weights: a rank without rows gets none, as with TensorFlow's strategies.
        if isinstance(source, PerRankStream):  # whose end is its own
            own = source.own_batches().map(lambda data, number: rows.slice(data, 0, number))
            return own.with_options(sharded_options())
        shards = source.dataset().map(lambda shard: rows.slice(shard.data, 0, shard.rows))
        if (length := dataset.cardinality()) != tf.data.UNKNOWN_CARDINALITY:  # loops ask for it
            shards = shards.apply(tf.data.experimental.assert_cardinality(length))
        return shards.with_options(sharded_options())

    return split


def describe_source(source: Source) -> dict[str, Any]:
    """Returns what must be equal of a source on all ranks, as JSON values by name."""
    summary = source.fingerprint()
    return {
        "kind": type(source).__name__,
        "signature": repr(source.signature),
        "number of samples or batches": source.cardinality,
        "number of steps": source.num_steps,
        # After an unseeded split or shuffle before the scope each rank has other rows of the same shape.
        _SEEDS: [each for each in summary if is_of_seeds(each)],
        _ROWS: [each for each in summary if not is_of_seeds(each)],
        "lookup tables, variables and tensors in its functions": source.functions_fingerprint(),
    }


def refuse_other_rows(method: str, name: str, rank: int) -> None:
    """Refuses data whose rows differ between the ranks, with the likely cause.

    Args:
        method: str, the method that the data was given to.
        name: str, what differs, a key of `describe_source`.
        rank: int, the rank on which it differs from rank 0.

    Raises:
        MismatchError: if that is the rows, or the seeds of what orders them.
    """
    if kind := {_ROWS: "rows", _SEEDS: "seeds"}.get(name):
        raise MismatchError(
            "Each rank has other data. The likely cause is a `train_test_split` without `random_state`; a shuffle, "
            "an `image_dataset_from_directory` or random numbers without a seed before the scope; or arrays that are "
            f"split by rank (`x[rank::size]`); or other names of files. Received: other {kind} in `{method}` on rank "
            f"{rank} than on rank 0. "
            "Expected the same data on all ranks: kdist shards it. Fix: pass a seed (`random_state=0`; to "
            "`tf.random.set_seed` the same on all ranks) and all rows, or make the data inside kdist.scope(); the same "
            "paths on all hosts; where each rank has its own data, kdist.scope(auto_shard=False)."
        )


def holds_random_state(source: Source) -> bool:
    """Returns whether Python's and NumPy's random states must not be set while a source is in use.

    A generator draws its order from them in a thread that runs ahead of training: every rank draws the same unless
    something else uses these states.
    """
    return source.draws_in_background and not isinstance(source, PyDatasetSource)


def has_fixed_shapes(source: Source) -> bool:
    """Returns whether all batches have the same shape but for the number of rows."""
    shapes = [leaf.shape for leaf in tf.nest.flatten(source.signature) if leaf is not None]
    return all(shape.rank is not None and shape[1:].is_fully_defined() for shape in shapes)


def batch_to_build_on(source: Source, model: keras.Model) -> Any:
    """Returns a batch, or its signature where that is enough, without taking a batch from an epoch.

    Args:
        source: `Source`.
        model: `keras.Model` that is to be built. If it has weights, losses and metrics need no lengths; if it has all,
            the result is `None`.
    """
    has_weights, has_losses = is_built(model)
    if has_weights and has_losses:
        return None
    ranks_are_known = all(leaf.shape.rank is not None for leaf in tf.nest.flatten(source.signature) if leaf is not None)
    if has_fixed_shapes(source) or (has_weights and ranks_are_known):
        return source.signature
    return source.example()
