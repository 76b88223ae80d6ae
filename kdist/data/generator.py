"""Python generators and other iterables of batches: every rank reads every batch and keeps its shard."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from kdist.data import sharding
from kdist.data.batch import Rows, Shard, batch_signature, lists_to_tuples
from kdist.data.graphs.fingerprint import fingerprint_of_targets
from kdist.data.graphs.options import untuned
from kdist.data.joined_batches import joined
from kdist.data.sharding import Plan
from kdist.data.source import Source, empty_input_error


def shard_batches(batches: Iterable[Any], plan: Plan) -> Iterator[Shard]:
    """Yields this rank's shard of each group of batches.

    Every rank must read the same batches in the same order.

    Args:
        batches: iterable of structures of arrays or tensors; `None` is kept.
        plan: `Plan`.

    Yields:
        `Shard` elements whose `rows` and `global_rows` are Python integers, one for each step, until `batches`
        end.
    """
    batches = iter(batches)
    for step in itertools.count():
        data, rows, total = None, 0, 0
        group: list[Any] = []
        for position in range(sharding.group(step, plan)[1]):
            try:
                batch = next(batches)
            except StopIteration:
                break
            if plan.splits_rows:
                group.append(batch)
                continue
            batch_rows = Rows(batch)
            count = batch_rows.count(batch)
            total += count
            if position == plan.shard_id:
                data, rows = batch, count
            elif data is None:
                data = batch_rows.head(batch, 1)
        if group:
            batch = joined(group)
            data, rows, total = Rows(batch).split_eagerly(batch, plan.num_shards, plan.shard_id)
        if data is None:
            return
        yield Shard(data, rows, total)


class GeneratorSource(Source):
    """This rank's shard of an iterable of batches.

    The user's code runs in a thread of `tf.data`, ahead of training.

    Args:
        batches: callable that returns an iterator over the user's batches, each a structure of arrays or
            tensors. It is called once for each pass, so what was peeked must be in it again.
        plan: `Plan`.
        signature: structure of `tf.TensorSpec` and the like of a batch. `None`, or a `tf.OptionalSpec`, stands
            for a `None` in every batch.
        first: the first batch, peeked; `None` if there is none.
        num_batches: int or `None`, how many there are, if it is known.
        is_single_pass: bool, whether `batches` continues at the place where it ended; not if their number is known.

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
        is_single_pass: bool = True,
    ):
        if first is None or num_batches == 0:
            raise empty_input_error("generator")
        self.plan = plan
        self._batches = batches
        self._first = first
        self.cardinality = num_batches
        self.is_single_pass = is_single_pass and num_batches is None
        if plan.splits_rows:
            Rows(first).slice(first, 0, 1)  # raises here, not in the thread that reads the data
        self._dataset = self._build(lists_to_tuples(signature))

    def targets_fingerprint(self) -> list[str]:
        """Returns a summary of the targets of the first batch."""
        return fingerprint_of_targets(self._first)

    def example(self) -> Any:
        """Returns the first batch, which the dataset yields again."""
        return self._first

    def dataset(self) -> tf.data.Dataset:
        """Returns the dataset of this rank's `Shard` elements."""
        return self._dataset

    def _build(self, spec: Any) -> tf.data.Dataset:
        specs = tf.nest.flatten(batch_signature(spec))
        # tf.data.Dataset.from_generator takes no `None`: it is left out and put back.
        tensors = [index for index, leaf in enumerate(specs) if leaf is not None]

        def elements() -> Iterator[tuple[Any, ...]]:
            for data, rows, global_rows in shard_batches(self._batches(), self.plan):
                leaves = tf.nest.flatten(data)
                yield tuple(leaves[index] for index in tensors), rows, global_rows

        def to_shard(leaves: Any, rows: Any, global_rows: Any) -> Shard:
            flat = [None] * len(specs)
            for index, leaf in zip(tensors, leaves, strict=True):
                flat[index] = leaf
            return Shard(tf.nest.pack_sequence_as(spec, flat), rows, global_rows)

        scalar = tf.TensorSpec([], tf.int64)
        signature = (tuple(specs[index] for index in tensors), scalar, scalar)
        shards = tf.data.Dataset.from_generator(elements, output_signature=signature).map(to_shard)
        return untuned(shards.prefetch(2))
