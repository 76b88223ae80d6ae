"""What ranks compare of their inputs before the first step: whether samples would be lost, or a file written twice."""

from __future__ import annotations

import collections
import functools
import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from kdist.data.graphs.inspection import orders_by_cores, shard_arguments, unwritten_cache_files
from kdist.data.make_source import describe_source, refuse_other_rows
from kdist.data.source import Source
from kdist.engines.engine import Engine
from kdist.errors import DataError
from kdist.keras_hooks.fit.data_adapters import tf_dataset
from kdist.state.comparison import gather_values, refuse_differences

logger = logging.getLogger("kdist")


class InputReport(NamedTuple):
    """What a rank tells the others of its input.

    Attributes:
        host: str, its host.
        cache_files: sequence of str, the files that its pipeline would write.
        shards: sequence of the arguments of each `shard` in it.
        targets: sequence of str, a summary of its first targets.
        num_own_batches: int or `None`, `Source.num_own_batches`.
        cores: int or `None`, the cores of the rank, if its data is ordered by their number.
    """

    host: str
    cache_files: Sequence[str]
    shards: Sequence[Sequence[int]]
    targets: Sequence[str]
    num_own_batches: int | None
    cores: int | None = None


def check_inputs(method: str, adapter: Any, source: Source, engine: Engine, *, auto_shard: bool) -> list[int | None]:
    """Refuses inputs that differ, would lose samples or write one file twice; warns of those that may lose samples.

    Collective: every rank must call this, in the same order.

    Args:
        method: str, the method that was given the input.
        adapter: Keras' `DataAdapter`.
        source: `Source` that was made of it.
        engine: `Engine`, over which the ranks exchange their reports.
        auto_shard: bool, whether kdist shards the input.

    Returns:
        A list of the `num_own_batches` of all ranks' sources.

    Raises:
        MismatchError: if the ranks have different kinds of data, or other data.
        DataError: if ranks of one host would write one cache, or if each rank has selected a shard already.
    """
    dataset = tf_dataset(adapter)
    files = [] if dataset is None else unwritten_cache_files(dataset)
    shards = [] if dataset is None or not auto_shard else shard_arguments(dataset)
    is_by_cores = dataset is not None and auto_shard and orders_by_cores(dataset)
    cores = len(os.sched_getaffinity(0)) if is_by_cores else None
    own = os.uname().nodename, files, shards, source.targets_fingerprint(), source.num_own_batches, cores
    report = InputReport(*own)
    what = f"the data given to {method}"
    described, gathered = zip(*gather_values(engine, what, [describe_source(source), report]), strict=True)
    refuse_differences(what, described, functools.partial(refuse_other_rows, f"model.{method}"))
    reports = [InputReport(*each) for each in gathered]
    refuse_shared_caches(reports)
    _refuse_repeated_sharding(reports)
    refuse_order_by_cores(reports)
    if engine.rank == 0:
        _warn_of_other_targets(reports)
    return [each.num_own_batches for each in reports]


def refuse_shared_caches(reports: Sequence[InputReport]) -> None:
    """Refuses a cache file that several ranks of one host would write.

    Args:
        reports: sequence of `InputReport`, of all ranks and hosts: all ranks must raise, or some would wait for others.

    Raises:
        DataError: if there is such a file.
    """
    writers = collections.Counter((report.host, path) for report in reports for path in set(report.cache_files))
    if shared := sorted(path for (_, path), count in writers.items() if count > 1):
        raise DataError(
            f"Ranks of one host would write one cache. Received: a tf.data pipeline with cache({shared[0]!r}), a file "
            "that does not exist yet, or is incomplete. Expected: one writer a file. Fix: use a file for each rank, as "
            f'cache(f"{shared[0]}-{{kdist.rank()}}"), or cache in memory, or iterate over the dataset once before, '
            "in `with kdist.chief_first():`."
        )


def _refuse_repeated_sharding(reports: Sequence[InputReport]) -> None:
    shards = [report.shards for report in reports]
    for rank in _others(shards):
        raise DataError(
            "The data would be sharded twice: by `shard` in the pipeline, and by kdist. Received: a tf.data "
            f"pipeline with {_calls(shards[0])} on rank 0, and with {_calls(shards[rank])} on rank {rank}."
            " Expected: the same pipeline on all ranks. Fix: leave `shard` out, or make the model in a scope "
            "with auto_shard=False."
        )


def refuse_order_by_cores(reports: Sequence[InputReport]) -> None:
    """Refuses data whose order follows the number of a rank's cores, where these numbers differ.

    Args:
        reports: sequence of `InputReport`, of all ranks: all must raise, or some would wait for others.

    Raises:
        DataError: if the numbers differ.
    """
    cores = [report.cores for report in reports]
    for rank in _others(cores):
        raise DataError(
            "The tf.data pipeline has another order on each rank: it reads as many inputs at once as a process has "
            f"cores. Received: {cores[0]} core(s) on rank 0, {cores[rank]} on rank {rank}, and an `interleave` without "
            "`cycle_length`, or a dataset with `num_parallel_reads=tf.data.AUTOTUNE`. Expected one order on all ranks. "
            "Fix: pass a number, as in `interleave(..., cycle_length=8)`."
        )


def _others(values: Sequence[Any]) -> list[int]:
    """Returns the ranks that have another value than rank 0."""
    return [rank for rank, value in enumerate(values) if value != values[0]]


def _calls(shards: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"shard({num_shards}, {index})" for num_shards, index in shards) or "no shard"


def _warn_of_other_targets(reports: Sequence[InputReport]) -> None:
    if others := _others([report.targets for report in reports]):
        logger.warning(
            "the first batch of rank(s) %s has other targets than that of rank 0. If the data was shuffled before the "
            "scope, or classes were numbered by the order of a set, samples are lost, or count as other classes. Fix: "
            "make the data inside kdist.scope(), or pass a seed to the shuffle; number by sorted(set(labels)); where "
            "each rank has data of its own, pass auto_shard=False. Targets drawn at random, as by mixup, may differ.",
            others,
        )
