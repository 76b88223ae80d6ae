"""`tf.data.Dataset`: every rank reads the same stream of batches and takes its own of each group."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kdist.data import choice, graph_order, sharding
from kdist.data.glimpse import of_pipeline
from kdist.data.own_stream import OwnStream
from kdist.data.pipeline import Pipeline, calls_python
from kdist.data.shard import Shard, batch_signature, count_rows, split_batch
from kdist.data.sharding import Plan
from kdist.data.source import Source, no_samples
from kdist.errors import DataError


def tf_data_source(dataset: tf.data.Dataset, plan: Plan, *, auto_shard: bool = True) -> Source:
    """Returns this rank's part of a batched `tf.data.Dataset`, by the user's own auto-shard policy.

    `AUTO` and `DATA` share out the batches. `FILE` and `HINT` share out files, or what the user's pipeline
    marks, as TensorFlow does; `OFF`, and `auto_shard=False`, leave a stream that is this rank's own already.

    Args:
        dataset: the user's `tf.data.Dataset` of batches.
        plan: `Plan`.
        auto_shard: bool, `False` if the user's stream is this rank's own.

    Returns:
        A `Source`.

    Raises:
        DataError: if the dataset is empty, may yield another order on each rank, or has too few files.
    """
    policies = tf.data.experimental.AutoShardPolicy
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if not auto_shard or policy == policies.OFF:
        return OwnStream(StreamSource(dataset, plan.alone()), plan)
    if policy not in (policies.FILE, policies.HINT):
        return StreamSource(dataset, plan)
    ordered = Pipeline(dataset, plan.seed).dataset()
    own = StreamSource(_shard_at_the_source(ordered, policy, plan), plan.alone())
    return OwnStream(own, plan, pieces=1 if plan.scale_batch else plan.num_shards)


class StreamSource(Source):
    """This rank's batches of a stream that every rank reads.

    The choice is made as early as the pipeline allows, so that an expensive `map` runs for this rank's samples only.

    Args:
        dataset: the user's `tf.data.Dataset` of batches.
        plan: `Plan`.

    Raises:
        DataError: if the dataset is empty, or may yield another order on each rank.
    """

    follows_iterators = True

    def __init__(self, dataset: tf.data.Dataset, plan: Plan):
        cardinality = int(dataset.cardinality())
        if cardinality == 0:
            raise no_samples("tf.data.Dataset")
        self.plan = plan
        self._num_batches = cardinality if cardinality > 0 else None
        self._user_dataset = dataset
        self._signature = batch_signature(dataset.element_spec)
        self.draws_in_background = calls_python(dataset)
        self._knows_global_rows = True
        self._dataset = self._build(dataset)

    @property
    def knows_global_rows(self) -> bool:
        """Whether the rows of all ranks are known: not if the user's last `map` runs for own batches only."""
        return self._knows_global_rows

    @property
    def num_steps(self) -> int | None:
        """The number of steps in a pass over the dataset; `None` if unknown or endless."""
        return None if self._num_batches is None else sharding.num_steps(self._num_batches, self.plan)

    @property
    def extent(self) -> int | None:
        """The number of the user's batches, if it is known."""
        return self._num_batches

    @property
    def signature(self) -> Any:
        """Structure of specs of `Shard.data`."""
        return self._signature

    def glimpse(self) -> list[str]:
        """Returns the seeds in the user's pipeline, and some rows of the tensors that it begins with."""
        return of_pipeline(self._user_dataset)

    def example(self) -> Any:
        """Returns a batch of the user's; the dataset is read anew for it."""
        for batch in self._user_dataset.take(1):
            return batch
        raise no_samples("tf.data.Dataset")

    def dataset(self) -> tf.data.Dataset:
        """Returns the dataset of this rank's `Shard` elements."""
        return self._dataset

    def _build(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        plan, spec = self.plan, dataset.element_spec
        if plan.num_shards == 1:
            return dataset.map(lambda *batch: _whole(choice.spread(spec, batch))).prefetch(tf.data.AUTOTUNE)
        ordered = Pipeline(dataset, plan.seed)
        if not plan.scale_batch:
            shards = ordered.dataset().map(
                lambda *batch: split_batch(choice.spread(spec, batch), plan.num_shards, plan.shard_id)
            )
        else:
            shards, self._knows_global_rows = choice.own_of_each_group(ordered, plan)
        options = tf.data.Options()
        options.deterministic = True
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return shards.with_options(options).prefetch(tf.data.AUTOTUNE)


def _whole(batch: Any) -> Shard:
    rows = count_rows(batch)
    return Shard(batch, rows, rows)


def _shard_at_the_source(dataset: tf.data.Dataset, policy: Any, plan: Plan) -> tf.data.Dataset:
    spec = tf.nest.flatten(dataset.element_spec)
    try:
        variant = tf.raw_ops.AutoShardDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            num_workers=plan.num_shards,
            index=plan.shard_id,
            auto_shard_policy=policy.value,
            output_types=[leaf.dtype if isinstance(leaf, tf.TensorSpec) else tf.variant for leaf in spec],
            output_shapes=[leaf.shape if isinstance(leaf, tf.TensorSpec) else None for leaf in spec],
        )
    except tf.errors.OpError as err:
        raise DataError(
            f"A tf.data pipeline that cannot be shared out by AutoShardPolicy.{policy.name}. Received: {dataset}, "
            f"{plan.num_shards} ranks ({err.message[:300]}). Expected: at least one file for each rank, read by a "
            "file dataset. Fix: make more files, or use AutoShardPolicy.DATA."
        ) from err
    return graph_order.from_variant(variant, dataset)
