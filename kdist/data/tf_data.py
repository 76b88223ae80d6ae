"""`tf.data.Dataset`: every rank reads the same stream of batches and selects one of each group."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from kdist.data.batch import Rows, Shard, batch_signature, int64
from kdist.data.batch_selection import select_shards
from kdist.data.graphs.dataset_internals import flat_structure, from_variant, resources_of
from kdist.data.graphs.fingerprint import fingerprint_of_functions, fingerprint_of_pipeline
from kdist.data.graphs.inspection import batch_sizes, calls_python, may_reshuffle
from kdist.data.graphs.options import is_tuned, iterated_internally, prefetched, sharded_options
from kdist.data.per_rank_stream import PerRankStream
from kdist.data.pipelines.groups import element_of
from kdist.data.pipelines.pipeline import Pipeline
from kdist.data.pipelines.reordering import chain_of
from kdist.data.sharding import Plan
from kdist.data.source import Source, empty_input_error
from kdist.errors import DataError


def tf_data_source(dataset: tf.data.Dataset, plan: Plan, *, auto_shard: bool = True) -> Source:
    """Returns this rank's part of a batched `tf.data.Dataset`, by the user's own auto-shard policy.

    `AUTO` and `DATA` shard batches. `FILE` and `HINT` shard files, or what the user's pipeline marks, as TensorFlow
    does. With `OFF` or `auto_shard=False` the stream is this rank's shard already.

    Args:
        dataset: the user's `tf.data.Dataset` of batches.
        plan: `Plan`.
        auto_shard: bool, `False` if the user's stream is this rank's shard.

    Returns:
        A `Source`.

    Raises:
        DataError: if the dataset is empty, may yield another order on each rank, or has too few files.
    """
    policies = tf.data.experimental.AutoShardPolicy
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if plan.joins_batches and policy in (policies.OFF, policies.FILE, policies.HINT):
        raise DataError(
            f"micro_batches does not support AutoShardPolicy.{policy.name}. Received: micro_batches="
            f"{plan.micro_batches} on {plan.num_shards} ranks, and a tf.data pipeline with AutoShardPolicy."
            f"{policy.name}, by which each rank has its own batches. Expected AutoShardPolicy.DATA or AUTO, by which "
            "all ranks read the same. Fix: set one of these, or omit micro_batches."
        )
    if not auto_shard or policy == policies.OFF:
        return PerRankStream(StreamSource(dataset, plan.unsharded()), plan)
    if policy not in (policies.FILE, policies.HINT):
        if int(dataset.cardinality()) == 0:
            raise empty_input_error("tf.data.Dataset")
        return StreamSource(dataset, plan)
    ordered = Pipeline(dataset, plan.seed).dataset()
    stream = StreamSource(_shard_by_policy(ordered, policy, plan), plan.unsharded(), tuned=is_tuned(dataset))
    return PerRankStream(stream, plan, num_splits=1 if plan.scale_batch else plan.num_shards)


class StreamSource(Source):
    """This rank's batches of a stream that every rank reads.

    They are selected as early as the pipeline allows, so that an expensive `map` runs for this rank's samples only.

    Args:
        dataset: the user's `tf.data.Dataset` of batches.
        plan: `Plan`.
        tuned: bool or `None`, whether `tf.data`'s tuner runs; `None` if `dataset` tells.

    Raises:
        DataError: if the dataset may yield another order on each rank.
    """

    is_skipped_by_reading = True

    def __init__(self, dataset: tf.data.Dataset, plan: Plan, *, tuned: bool | None = None):
        cardinality = int(dataset.cardinality())
        self.plan = plan
        self.cardinality = cardinality if cardinality >= 0 else None
        self._user_dataset = dataset
        self._batch_sizes = batch_sizes(dataset)
        self._signature = batch_signature(dataset.element_spec, self._batch_sizes)
        self.draws_in_background = calls_python(dataset)
        self.reshuffles_each_iteration = may_reshuffle(dataset)
        self._dataset, self.knows_global_rows = self._kept_or_built(dataset, tuned)

    @property
    def signature(self) -> Any:
        """Structure of specs of `Shard.data`."""
        return self._signature

    def fingerprint(self) -> list[str]:
        """Returns the seeds in the user's pipeline, and the means of some rows of the tensors that it begins with."""
        return fingerprint_of_pipeline(self._user_dataset)

    def functions_fingerprint(self) -> list[str]:
        """Returns summaries of what the functions of the user's pipeline capture."""
        return fingerprint_of_functions(self._user_dataset)

    def example(self) -> Any:
        """Returns the user's first batch, by a new iterator."""
        for batch in iterated_internally(self._user_dataset.take(1)):
            return batch
        raise empty_input_error("tf.data.Dataset")

    def dataset(self) -> tf.data.Dataset:
        """Returns the dataset of this rank's `Shard` elements."""
        return self._dataset

    def _kept_or_built(self, dataset: tf.data.Dataset, tuned: bool | None) -> tuple[tf.data.Dataset, bool]:
        """Returns the shards and whether they know the rows of all ranks.

        To trace a pipeline's functions takes as long as many a small step. So the user's dataset keeps the shards for
        the next call; or the operations of which they are made again, where their order is another one there.
        """
        kept = resources_of(dataset)
        key = ("shards", dataclasses.replace(self.plan, seed=0))
        if key in kept:
            chain, knows_global_rows = kept[key]
            return chain.in_order_of(dataset, self.plan.seed), knows_global_rows
        # AutoGraph would convert kdist's own functions, which need it as little as the user's traced ones.
        build = tf.autograph.experimental.do_not_convert(self._build)
        shards, knows_global_rows, ordered = build(dataset, tuned)
        if chain := chain_of(shards, ordered):
            kept[key] = chain, knows_global_rows
        return shards, knows_global_rows

    def _build(self, dataset: tf.data.Dataset, tuned: bool | None) -> tuple[tf.data.Dataset, bool, Pipeline | None]:
        plan, spec = self.plan, dataset.element_spec
        rows, options = Rows(spec, self._batch_sizes), tf.data.Options()
        parallel_maps: tuple[Any, ...] = ()
        knows_global_rows, ordered = True, None
        if plan.num_shards == 1 and not plan.joins_batches:

            def to_shard(*arguments: Any) -> Shard:
                batch = element_of(spec, arguments)
                return Shard(batch, int64(rows.count(batch)), int64(rows.count(batch)))

            shards = dataset.map(to_shard)
        else:
            ordered = Pipeline(dataset, plan.seed)
            shards, knows_global_rows, parallel_maps, is_rewritten = select_shards(ordered, plan, rows)
            options = sharded_options()
            options.deterministic = True
            if not is_rewritten:  # which takes milliseconds, in each call where the order is another one
                options.experimental_optimization.apply_default_optimizations = False
        options.autotune.enabled = is_tuned(dataset, parallel_maps) if tuned is None else tuned
        return prefetched(shards.with_options(options)), knows_global_rows, ordered


def _shard_by_policy(dataset: tf.data.Dataset, policy: Any, plan: Plan) -> tf.data.Dataset:
    try:
        variant = tf.raw_ops.AutoShardDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            num_workers=plan.num_shards,
            index=plan.shard_id,
            auto_shard_policy=policy.value,
            **flat_structure(dataset),
        )
    except tf.errors.OpError as err:
        raise DataError(
            f"The tf.data pipeline cannot be sharded by AutoShardPolicy.{policy.name}. Received: {dataset}, "
            f"{plan.num_shards} ranks ({err.message[:300]}). Expected: at least one file for each rank, read by a "
            "file dataset. Fix: make more files, or use AutoShardPolicy.DATA."
        ) from err
    return from_variant(variant, dataset)
