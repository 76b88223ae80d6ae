"""Pipelines of `tf.data` that the user iterates by hand, in one order on all ranks.

What is made of their first elements (a vocabulary, statistics, a sample for `predict`) is then equal on all ranks. And
the next `fit` has the order that it has in one process: each iteration of a seeded shuffle makes its next order.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kdist.data.graphs.dataset_internals import (
    BY_HAND,
    IS_INTERNAL,
    ORDERS,
    inputs,
    is_seeded_shuffle,
    kind,
    resources_of,
    with_inputs,
)
from kdist.data.pipelines.pipeline import Pipeline, is_bound_to_other_task, nondeterministic_parts
from kdist.data.pipelines.seeds import PipelineSeeds
from kdist.errors import DataError
from kdist.keras_hooks.patching import DATASET_METHODS, patched

_log = logging.getLogger("kdist")


def count_iterations() -> None:
    """Counts from now on how often seeded shuffles are iterated by hand.

    A loop that iterates a `repeat` of a shuffle counts as one iteration, in whichever repetition it ends.
    """

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(dataset: Any, *args: Any, **kwargs: Any) -> Any:
            if tf.executing_eagerly():
                _count_iteration(dataset)
            return method(dataset, *args, **kwargs)

        counted.patches = patches  # type: ignore[attr-defined]  # as long as there is the method
        return counted

    patches = contextlib.ExitStack()
    for name in DATASET_METHODS:
        patches.enter_context(patched(tf.data.Dataset, name, counting(getattr(tf.data.Dataset, name))))


def _count_iteration(dataset: Any) -> None:
    if IS_INTERNAL not in resources_of(dataset):
        for each in _iterated_shuffles(dataset):
            kept = resources_of(each)
            kept[BY_HAND] = kept.get(BY_HAND, 0) + 1


def _iterated_shuffles(dataset: Any) -> list[Any]:
    """Returns the seeded shuffles that an iteration makes an order of: not what comes later, or before a cache."""
    if kind(dataset) == "Cache":
        return []
    first = inputs(dataset)[: 1 if kind(dataset) == "Concatenate" else None]
    found = [shuffle for each in first for shuffle in _iterated_shuffles(each)]
    return [*found, dataset] if is_seeded_shuffle(dataset) else found


@contextlib.contextmanager
def one_order(seed: int) -> Iterator[None]:
    """A context in which unseeded shuffles that are iterated eagerly follow one order on all ranks.

    No message is sent: one rank may iterate alone. The order of an iteration follows from the seed, from what is
    shuffled, and from how many pipelines like it were iterated before.

    Args:
        seed: int, equal on all ranks.
    """
    seeds = PipelineSeeds(seed)

    def ordered(dataset: Any) -> Any:
        if not tf.executing_eagerly():
            return dataset
        kept = resources_of(dataset)
        if "in one order" not in kept:
            kept["in one order"] = _in_one_order(dataset, seeds)
        return kept["in one order"] or dataset

    def replacement(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def of_ordered(dataset: Any, *args: Any, **kwargs: Any) -> Any:
            replaced = ordered(dataset)
            if replaced is not dataset:  # `count_iterations` does not see the user's
                _count_iteration(dataset)
            return method(replaced, *args, **kwargs)

        return of_ordered

    with contextlib.ExitStack() as stack:
        for name in DATASET_METHODS:
            stack.enter_context(patched(tf.data.Dataset, name, replacement(getattr(tf.data.Dataset, name))))
        yield


def _in_one_order(dataset: Any, seeds: PipelineSeeds) -> Any:
    """Returns a dataset with one order; `None` where the user's has one, or where each rank has data of its own."""
    if dataset.options().experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF:
        return None
    parts = " ".join(nondeterministic_parts(dataset))
    is_sloppy = dataset.options().deterministic is False
    if not parts and not is_sloppy and not is_bound_to_other_task(dataset):
        return None
    options = tf.data.Options()
    options.deterministic = True
    seed = seeds.next(parts)
    try:
        with _own_orders(dataset):
            # All of it: a dataset of its own, which is on the device that this process has now.
            return Pipeline(dataset, seed).dataset().take(-1).with_options(options)
    except DataError as err:
        _log.warning("Ranks may see different orders when the script iterates over a dataset. %s", err)
        return None


@contextlib.contextmanager
def _own_orders(dataset: Any) -> Iterator[None]:
    """Gives the shuffles of a pipeline that is made meanwhile orders of their own: one rank alone may iterate."""
    kept = list({id(each): resources_of(each) for each in with_inputs(dataset)}.values())
    of_fit = [{name: each.pop(name) for name in ORDERS if name in each} for each in kept]
    try:
        yield
    finally:
        for each, orders in zip(kept, of_fit, strict=True):
            each["by hand"] = {name: each.pop(name) for name in ORDERS if name in each}  # as long as the dataset lives
            each.update(orders)
