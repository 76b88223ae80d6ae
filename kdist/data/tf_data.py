"""`tf.data.Dataset`: every rank reads the same stream of batches and takes its own of each group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdist.data import graph_order, pipeline, sharding, variants
from kdist.data.own_stream import OwnStream
from kdist.data.pipeline import Pipeline
from kdist.data.shard import Shard, batch_signature, count_rows, int64, row_leaves, slice_rows, split_batch
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

    The choice is made before the user's last one-to-one steps (`map`, `prefetch`), so that they run for this
    rank's batches only.

    Args:
        dataset: the user's `tf.data.Dataset` of batches.
        plan: `Plan`.

    Raises:
        DataError: if the dataset is empty, or may yield another order on each rank.
    """

    def __init__(self, dataset: tf.data.Dataset, plan: Plan):
        cardinality = int(dataset.cardinality())
        if cardinality == 0:
            raise no_samples("tf.data.Dataset")
        self.plan = plan
        self._num_batches = cardinality if cardinality > 0 else None
        self._user_dataset = dataset
        self._signature = batch_signature(dataset.element_spec)
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
    def signature(self) -> Any:
        """Structure of specs of `Shard.data`."""
        return self._signature

    def example(self) -> Any:
        """Returns a batch of the user's; the dataset is read anew for it."""
        return next(iter(self._user_dataset.take(1)))

    def dataset(self) -> tf.data.Dataset:
        """Returns the dataset of this rank's `Shard` elements."""
        return self._dataset

    def _build(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        plan, spec = self.plan, dataset.element_spec
        if plan.num_shards == 1:
            return dataset.map(lambda *batch: _whole(_element(spec, batch))).prefetch(tf.data.AUTOTUNE)
        ordered = Pipeline(dataset, plan.seed)
        if not plan.scale_batch:
            shards = ordered.dataset().map(
                lambda *batch: split_batch(_element(spec, batch), plan.num_shards, plan.shard_id)
            )
        else:
            shards = self._own_of_each_group(ordered)
        options = tf.data.Options()
        options.deterministic = True
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return shards.with_options(options).prefetch(tf.data.AUTOTUNE)

    def _own_of_each_group(self, ordered: Pipeline) -> tf.data.Dataset:
        first = len(ordered.steps)
        while first > 0 and pipeline.carries_along(ordered.steps[first - 1]):
            first -= 1
        carried = ordered.steps[first:]
        if not any("Map" in type(step).__name__ for step in carried):
            first, carried = len(ordered.steps), ()
        size = _static_rows(self._user_dataset.element_spec)
        countable = size is None and not carried
        self._knows_global_rows = size is not None or countable

        def finish(data: Any, active: Any, total: Any) -> Shard:
            rows = count_rows(data)
            data = slice_rows(data, 0, tf.where(active, rows, 1))
            if size is not None:
                total = total * size
            elif not countable:
                # A map may change the number of rows, and the others' maps run on other ranks.
                total = tf.constant(-1, tf.int64)
            return Shard(data, tf.where(active, rows, 0), total)

        if not carried:
            return pick(ordered.dataset(), self.plan, finish, by_rows=countable)
        shards = pick(ordered.dataset(first), self.plan, _triple, by_rows=False)
        for step in carried:
            shards = pipeline.beside(step, shards)
        return shards.map(finish)


def pick(
    dataset: tf.data.Dataset, plan: Plan, finish: Callable[[Any, Any, Any], Any], *, by_rows: bool
) -> tf.data.Dataset:
    """Takes one element of each group of `plan.num_shards`.

    Elements travel through `batch` as variants, by reference: nothing is copied, shapes may differ.

    Args:
        dataset: `tf.data.Dataset` of any elements.
        plan: `Plan`. Groups restart after each `steps_per_epoch` elements.
        finish: callable that takes `(element, active, total)`: this rank's element of the group, or the group's
            first where `active` is `False`; and the group's rows (its elements, if not `by_rows`), an `int64`
            scalar.
        by_rows: bool, whether elements are batches whose rows are to be counted.

    Returns:
        A dataset of what `finish` returns.
    """
    spec = dataset.element_spec

    def wrap(*batch: Any) -> Any:
        element = _element(spec, batch)
        return variants.wrap(element), count_rows(element) if by_rows else tf.constant(1, tf.int64)

    def choose(elements: Any, rows: Any) -> Any:
        active = tf.reduce_any(rows[plan.shard_id : plan.shard_id + 1] > 0)
        # The first that holds something, where this rank has none.
        place = tf.where(active, int64(plan.shard_id), tf.argmax(tf.cast(rows > 0, tf.int32)))
        return finish(variants.unwrap(spec, elements[place]), active, tf.reduce_sum(rows))

    wrapped = dataset.map(wrap)
    epoch = plan.steps_per_epoch
    if epoch is not None and epoch % plan.num_shards:
        blank = tf.data.Dataset.from_tensors(0).map(lambda _: (variants.blank(), tf.constant(0, tf.int64)))
        padded = -(-epoch // plan.num_shards) * plan.num_shards
        turns = tf.data.Dataset.range(padded).map(lambda turn: int64(turn >= epoch)).repeat()
        wrapped = tf.data.Dataset.choose_from_datasets([wrapped, blank.repeat()], turns, stop_on_empty_dataset=True)
    return wrapped.batch(plan.num_shards).map(choose)


def _triple(element: Any, active: Any, total: Any) -> Any:
    return element, active, total


def _whole(batch: Any) -> Shard:
    rows = count_rows(batch)
    return Shard(batch, rows, rows)


def _element(spec: Any, arguments: tuple[Any, ...]) -> Any:
    # tf.data spreads a plain tuple over a function's arguments.
    return arguments if type(spec) is tuple else arguments[0]


def _static_rows(spec: Any) -> int | None:
    leaves = row_leaves(spec)
    return leaves[0].shape[0] if leaves and leaves[0].shape.rank else None


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
