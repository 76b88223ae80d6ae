"""What a user's `tf.data` pipeline does besides yielding elements: cache files, shards, Python functions."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kdist.data.graphs.dataset_internals import attributes, functions, is_known, kind, with_inputs
from kdist.data.graphs.graph_def import node_lists

_READS = "_num_parallel_reads"


def unwritten_cache_files(dataset: Any) -> list[str]:
    """Returns the files in which a pipeline caches its elements, and that do not exist yet, or are incomplete."""
    caches = [attributes(each) for each in with_inputs(dataset) if kind(each) == "Cache"]
    names = [tf.convert_to_tensor(getattr(cache, "filename", "")).numpy().decode() for cache in caches]
    return [name for name in names if name and not tf.io.gfile.exists(f"{name}.index")]


def orders_by_cores(dataset: Any) -> bool:
    """Returns whether a pipeline reads as many inputs at once, in turns, as this process has cores.

    So does an `interleave` without `cycle_length`, and `TFRecordDataset(..., num_parallel_reads=tf.data.AUTOTUNE)`.
    Where the auto-shard policy gives each rank data of its own, their order is no matter.
    """
    policies = tf.data.experimental.AutoShardPolicy
    if dataset.options().experimental_distribute.auto_shard_policy not in (policies.AUTO, policies.DATA):
        return False
    found = [getattr(each, name, None) for each in with_inputs(dataset) for name in ("_cycle_length", _READS)]
    return any(int(each) == tf.data.AUTOTUNE for each in found if each is not None)


def shard_arguments(dataset: Any) -> list[list[int]]:
    """Returns the arguments `[num_shards, index]` of each `shard` in a pipeline; none with `AutoShardPolicy.OFF`."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == tf.data.experimental.AutoShardPolicy.OFF:
        return []
    shards = [attributes(each) for each in with_inputs(dataset) if kind(each) == "Shard"]
    return [[int(shard.num_shards), int(shard.index)] for shard in shards if hasattr(shard, "index")]


def batch_sizes(dataset: Any) -> set[int]:
    """Returns the sizes of the batches that a pipeline makes."""
    batches = [
        attributes(each) for each in with_inputs(dataset) if kind(each) in ("Batch", "PaddedBatch", "ParallelBatch")
    ]
    return {int(batch.batch_size) for batch in batches if hasattr(batch, "batch_size")}


def calls_python(dataset: Any) -> bool:
    """Returns whether Python functions of the user make a dataset's elements; `False` where this is not known."""
    python = {"GeneratorDataset", "PyFunc", "EagerPyFunc"}
    try:
        return any(
            node.op in python
            for each in with_inputs(dataset)
            for function in functions(each)
            for nodes in node_lists(function.graph.as_graph_def())
            for node in nodes
        )
    except (AttributeError, TypeError):
        return False


def is_stateless(step: Any) -> bool:
    """Returns whether a step's functions only compute from their arguments, and from constants.

    An operation that calls a function with a state is itself one with a state for TensorFlow.
    """
    return not any(op.op_def.is_stateful for function in functions(step) for op in function.graph.get_operations())


def may_reshuffle(dataset: Any) -> bool:
    """Returns whether the elements of a pass may depend on how many iterators were made before."""
    return any(
        not is_known(each) or kind(each) in ("Random", "Shuffle") or not is_stateless(each)
        for each in with_inputs(dataset)
    )


def leaves_maps_to_tensorflow(options: tf.data.Options) -> bool:
    """Returns whether TensorFlow may make a map parallel that was not asked to be, by the options of a pipeline."""
    rewrites = options.experimental_optimization
    asked = (options.autotune.enabled, rewrites.map_parallelization, rewrites.apply_default_optimizations)
    return all(value is not False for value in asked)
