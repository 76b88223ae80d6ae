"""Python generators and other iterables of batches: every rank reads every batch and keeps its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from kdist.data import sharding
from kdist.data.glimpse import of_targets
from kdist.data.shard import Shard, batch_signature, lists_to_tuples, row_leaves, slice_rows
from kdist.data.sharding import Plan
from kdist.data.source import Source, no_samples


def own_shards(batches: Iterable[Any], plan: Plan) -> Iterator[Shard]:
    """Yields this rank's part of each group of batches.

    Every rank must read the same batches in the same order.

    Args:
        batches: iterable of structures of arrays or tensors; `None` is kept.
        plan: `Plan`.

    Yields:
        `Shard` elements whose `rows` and `global_rows` are Python integers, one for each step, until `batches`
        end.
    """
    batches = iter(batches)
    for size in sharding.group_sizes(plan):
        mine, rows, total = None, 0, 0
        for place in range(size):
            try:
                batch = next(batches)
            except StopIteration:
                break
            count = num_rows(batch)
            total += count
            if not plan.scale_batch:
                start, stop = sharding.split_rows(count, plan.num_shards, plan.shard_id)
                rows = stop - start
                mine = slice_rows(batch, start, stop) if rows else slice_rows(batch, 0, 1)
            elif place == plan.shard_id:
                mine, rows = batch, count
            elif mine is None:
                mine = slice_rows(batch, 0, 1)
        if mine is None:
            return
        yield Shard(mine, rows, total)


def num_rows(batch: Any) -> int:
    """Returns the number of rows of a batch of arrays or tensors; 1 if nothing in it has rows."""
    for leaf in row_leaves(batch):
        return int(leaf.shape[0])
    return 1


class GeneratorSource(Source):
    """This rank's part of an iterable of batches.

    The user's code runs in a thread of `tf.data`, ahead of training.

    Args:
        batches: callable that returns an iterator over the user's batches, each a structure of arrays or
            tensors. It is called once for each pass, so what was peeked must be in it again.
        plan: `Plan`.
        signature: structure of `tf.TensorSpec` and its kin of a batch. `None`, or a `tf.OptionalSpec`, stands
            for a `None` in every batch.
        first: the first batch, peeked; `None` if there is none.
        num_batches: int or `None`, how many there are, if it is known.

    Raises:
        DataError: if there is no batch.
    """

    draws_in_background = True

    def __init__(
        self,
        batches: Callable[[], Iterable[Any]],
        plan: Plan,
        *,
        signature: Any,
        first: Any,
        num_batches: int | None = None,
    ):
        if first is None or num_batches == 0:
            raise no_samples("generator")
        self.plan = plan
        self._batches = batches
        self._first = first
        self._num_batches = num_batches
        self.reads_once = num_batches is None  # what knows its length is no generator
        self._spec = lists_to_tuples(signature)
        self._leaves = [place for place, spec in enumerate(tf.nest.flatten(self._spec)) if not _stands_for_none(spec)]
        self._dataset = self._build()

    @property
    def num_steps(self) -> int | None:
        """The steps of a pass, if the number of batches is known."""
        return None if self._num_batches is None else sharding.num_steps(self._num_batches, self.plan)

    @property
    def extent(self) -> int | None:
        """The number of the user's batches, if it is known."""
        return self._num_batches

    @property
    def signature(self) -> Any:
        """Structure of specs of `Shard.data`."""
        return batch_signature(self._dataset.element_spec.data)

    def seen_targets(self) -> list[str]:
        """Returns what the targets of the first batch look like."""
        return of_targets(self._first)

    def example(self) -> Any:
        """Returns the first batch, which is not lost."""
        return self._first

    def dataset(self) -> tf.data.Dataset:
        """Returns the dataset of this rank's `Shard` elements."""
        return self._dataset

    def _build(self) -> tf.data.Dataset:
        specs = tf.nest.flatten(batch_signature(self._spec))
        scalar = tf.TensorSpec([], tf.int64)

        # tf.data.Dataset.from_generator knows no `None`: it is left out and put back.
        def elements() -> Iterator[tuple[Any, ...]]:
            for data, rows, global_rows in own_shards(self._batches(), self.plan):
                leaves = tf.nest.flatten(data)
                yield tuple(leaves[place] for place in self._leaves), rows, global_rows

        def pack(leaves: Any, rows: Any, global_rows: Any) -> Shard:
            flat = [None] * len(specs)
            for place, leaf in zip(self._leaves, leaves, strict=True):
                flat[place] = leaf
            return Shard(tf.nest.pack_sequence_as(self._spec, flat), rows, global_rows)

        signature = (tuple(specs[place] for place in self._leaves), scalar, scalar)
        shards = tf.data.Dataset.from_generator(elements, output_signature=signature).map(pack)
        options = tf.data.Options()
        options.autotune.enabled = False  # see `ArraySource`
        return shards.prefetch(2).with_options(options)


def _stands_for_none(spec: Any) -> bool:
    return spec is None or isinstance(spec, tf.OptionalSpec)
