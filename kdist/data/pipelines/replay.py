"""The operations at the end of a pipeline, each applied to another dataset: no element and no graph is serialised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kdist.data.graphs import dataset_internals as internals
from kdist.data.graphs.dataset_internals import (
    attributes,
    flat_structure,
    from_variant,
    functions,
    is_nondeterministic_op,
    kind,
    reshuffles,
)
from kdist.data.pipelines.determinism import shuffle_with, skip_orders


def replay(step: Any, dataset: Any, seed: int = 0) -> Any:
    """Returns a dataset with the last operation of another one applied to it.

    Args:
        step: the user's dataset whose operation it is, one that `can_be_replayed`.
        dataset: `tf.data.Dataset`.
        seed: int, of a shuffle that has none.
    """
    return _REPLAYS[kind(step)](step, dataset, seed)


def can_be_replayed(step: Any) -> bool:
    """Returns whether `replay` can apply the last operation of a dataset."""
    return kind(step) in _REPLAYS and internals.is_known(step) and not internals.holds_datasets(step)


def _replay_map(step: Any, dataset: Any, seed: int) -> Any:
    del seed
    (function,) = functions(step)
    arguments = {
        "input_dataset": tf.data.experimental.to_variant(dataset),
        "other_arguments": function.captured_inputs,
        "f": function,
        "preserve_cardinality": True,
        **flat_structure(step),
    }
    if kind(step) == "ParallelMap":
        calls = attributes(step).num_parallel_calls
        variant = tf.raw_ops.ParallelMapDatasetV2(num_parallel_calls=calls, deterministic="true", **arguments)
    else:
        variant = tf.raw_ops.MapDataset(**arguments)
    return from_variant(variant, step)


def _replay_batch(step: Any, dataset: Any, seed: int) -> Any:
    del seed
    op = attributes(step)
    calls = getattr(op, "num_parallel_calls", None)
    return dataset.batch(int(op.batch_size), bool(op.drop_remainder), calls, None if calls is None else True)


def _replay_shuffle(step: Any, dataset: Any, seed: int) -> Any:
    op = attributes(step)
    seeds = op.seed, op.seed2
    if is_nondeterministic_op(step):
        return shuffle_with((seed, 0), dataset, op.buffer_size, reshuffle=reshuffles(step), owner=step)
    generator = _seed_generator(step) if reshuffles(step) else None
    return shuffle_with(seeds, dataset, op.buffer_size, reshuffle=reshuffles(step), generator=generator, owner=step)


def _seed_generator(step: Any) -> Any:
    """Returns the resource that makes a seeded shuffle's order in each pass; a second `fit` continues with it."""
    kept = internals.resources_of(step)
    if internals.GENERATOR not in kept:
        op = attributes(step)
        made = tf.raw_ops.AnonymousSeedGenerator(seed=op.seed, seed2=op.seed2, reshuffle=True)
        kept[internals.GENERATOR] = made
        skip_orders(orders_of(made), kept.get(internals.SKIPPED, 0))
    return kept[internals.GENERATOR].handle


def orders_of(generator: Any) -> tf.data.Dataset:
    """Returns a dataset each of whose iterations makes an order of a seed generator."""
    number = tf.data.Dataset.range(1)
    return shuffle_with((1, 1), number, 1, reshuffle=True, generator=generator.handle, owner=generator)


def _replay_flat_map(step: Any, dataset: Any, seed: int) -> Any:
    del seed
    (function,) = functions(step)
    arguments = {"other_arguments": function.captured_inputs, "f": function}
    return _applied(tf.raw_ops.FlatMapDataset, step, dataset, **arguments, **flat_structure(step))


def _replay_filter(step: Any, dataset: Any, seed: int) -> Any:
    del seed
    (function,) = functions(step)
    arguments = {"other_arguments": function.captured_inputs, "predicate": function}
    return _applied(tf.raw_ops.FilterDataset, step, dataset, **arguments, **flat_structure(step))


def _replay_padded_batch(step: Any, dataset: Any, seed: int) -> Any:
    del seed
    op = attributes(step)
    return _applied(
        tf.raw_ops.PaddedBatchDatasetV2,
        step,
        dataset,
        batch_size=op.batch_size,
        padded_shapes=[tf.cast(shape, tf.int64) for shape in tf.nest.flatten(op.padded_shapes)],
        padding_values=tf.nest.flatten(op.padding_values),
        drop_remainder=op.drop_remainder,
        output_shapes=flat_structure(step)["output_shapes"],
    )


def _replay_unbatch(step: Any, dataset: Any, seed: int) -> Any:
    del seed
    return _applied(tf.raw_ops.UnbatchDataset, step, dataset, **flat_structure(step))


def _applied(op: Callable[..., Any], step: Any, dataset: Any, **arguments: Any) -> Any:
    variant = op(input_dataset=tf.data.experimental.to_variant(dataset), **arguments)
    return from_variant(variant, step, dataset)


# How each operation that a pipeline is split into is applied to another dataset, with a seed if it has none.
_REPLAYS: dict[str, Callable[[Any, Any, int], Any]] = {
    "Batch": _replay_batch,
    "Cache": lambda step, dataset, _: dataset.cache(),
    "Filter": _replay_filter,
    "FlatMap": _replay_flat_map,
    "Map": _replay_map,
    "Options": lambda step, dataset, _: dataset.with_options(step.options()),
    "PaddedBatch": _replay_padded_batch,
    "ParallelBatch": _replay_batch,
    "ParallelMap": _replay_map,
    "Prefetch": lambda step, dataset, _: dataset.prefetch(int(attributes(step).buffer_size)),
    "Repeat": lambda step, dataset, _: dataset.repeat(attributes(step).count),
    "Restructured": lambda step, dataset, _: from_variant(tf.data.experimental.to_variant(dataset), step, dataset),
    "Shuffle": _replay_shuffle,
    "Skip": lambda step, dataset, _: dataset.skip(attributes(step).count),
    "Take": lambda step, dataset, _: dataset.take(attributes(step).count),
    "Unbatch": _replay_unbatch,
}
