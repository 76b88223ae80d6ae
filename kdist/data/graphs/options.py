"""Options of a rank's shard, and whether `tf.data`'s tuner has anything to choose in a pipeline.

The end of a tuned iterator waits for the tuner's thread, which may sleep for a while: a call would return late. The
buffer of `prefetch(AUTOTUNE)` is none of the tuner's: the operation itself lets it grow whenever it was found empty.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tensorflow as tf

from kdist.data.graphs.dataset_internals import (
    IS_INTERNAL,
    asked_parallelism,
    functions,
    is_known,
    kind,
    resources_of,
    with_inputs,
)
from kdist.data.graphs.graph_def import node_lists
from kdist.data.graphs.inspection import is_stateless, leaves_maps_to_tensorflow

# Operations beside the known ones of which nothing is tuned but what is asked for.
_PLAIN = ("FixedLengthRecord", "GroupByWindow", "Interleave", "ParallelInterleave", "Scan", "TFRecord")
_BUFFERED = ("Model", "Snapshot", "Load", "Parallel")  # beginnings of operations in functions


def sharded_options() -> tf.data.Options:
    """Returns options by which a dataset is not sharded again if it is given to `fit`."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without a tuner: the end of a tuned iterator waits for the tuner's thread, which sleeps."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def iterated_internally(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns an untuned dataset whose iterations are kdist's own, not the user's; see `eager_order.py`."""
    made = untuned(dataset)
    resources_of(made)[IS_INTERNAL] = True
    return made


def prefetched(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset that makes elements ahead of their use: as many as the tuner says, or two without it."""
    has_tuner = dataset.options().autotune.enabled is not False
    return dataset.prefetch(tf.data.AUTOTUNE if has_tuner else 2)


def is_tuned(dataset: tf.data.Dataset, parallel_maps: Collection[Any] = ()) -> bool:
    """Returns whether the tuner is to run for a user's dataset.

    It is if the user's options say so; if they leave it open, where a transformation asks for `tf.data.AUTOTUNE`, where
    TensorFlow makes a map parallel that was not asked to be, and where it cannot be seen what there is.

    Args:
        dataset: the user's `tf.data.Dataset`.
        parallel_maps: collection of dataset objects of the pipeline whose maps are made again, in parallel: these need
            no tuner.
    """
    options = dataset.options()
    asked = options.autotune
    if asked.enabled is not None:
        return bool(asked.enabled)
    if any(value is not None for value in (asked.cpu_budget, asked.ram_budget, asked.autotune_algorithm)):
        return True
    makes_parallel = leaves_maps_to_tensorflow(options)
    anew = {id(each) for each in parallel_maps}
    return any(_is_tunable(each, makes_parallel and id(each) not in anew) for each in with_inputs(dataset))


def _is_tunable(dataset: Any, makes_parallel: bool) -> bool:
    if not is_known(dataset) and kind(dataset) not in _PLAIN:
        return True
    if asked_parallelism(dataset) == tf.data.AUTOTUNE:
        return True
    if kind(dataset) == "Map":
        return makes_parallel and is_stateless(dataset)
    return any(
        node.op.startswith(_BUFFERED)
        for function in functions(dataset)
        for nodes in node_lists(function.graph.as_graph_def())
        for node in nodes
    )
