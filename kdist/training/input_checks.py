"""What ranks tell each other of their inputs before the first step: what would be lost, or written twice."""

from __future__ import annotations

import collections
import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from kdist.data.pipeline import files_to_write, shards_by_hand
from kdist.data.source import Source
from kdist.engines.engine import Engine
from kdist.errors import DataError
from kdist.training import _keras_internals as internals

logger = logging.getLogger("kdist")


class _Told(NamedTuple):
    """What one rank tells: the host, the files that its pipeline would write, its own shards, and some targets."""

    host: str
    files: Sequence[str]
    shards: Sequence[Sequence[int]]
    targets: Sequence[str]


def check_inputs(adapter: Any, source: Source, engine: Engine, *, auto_shard: bool) -> None:
    """Refuses what cannot go well on several ranks, and warns of what may not.

    Collective: every rank must call this, in the same order, whatever its input is.

    Args:
        adapter: Keras' `DataAdapter`.
        source: `Source` that was made of it.
        engine: `Engine`, how the ranks talk to each other.
        auto_shard: bool, whether kdist shares the input out.

    Raises:
        DataError: if ranks of one host would write one cache, or if each has taken a shard and would get a part of it.
    """
    dataset = internals.tf_dataset(adapter)
    files = [] if dataset is None else files_to_write(dataset)
    shards = [] if dataset is None or not auto_shard else shards_by_hand(dataset)
    mine = _Told(os.uname().nodename, files, shards, source.seen_targets())
    everyone = [_Told(*each) for each in engine.gather_objects(tuple(mine))]
    _refuse_shared_caches(everyone)
    _refuse_shards_of_shards(everyone)
    _warn_of_other_targets(everyone, engine.rank)


def _refuse_shared_caches(everyone: Sequence[_Told]) -> None:
    # Of any host: the ranks of the others would wait for those that raise.
    writers = collections.Counter((told.host, path) for told in everyone for path in set(told.files))
    if twice := sorted(path for (_, path), count in writers.items() if count > 1):
        raise DataError(
            f"Ranks of one host would write one cache. Received: a tf.data pipeline with cache({twice[0]!r}), a file "
            "that is not there yet, or not whole. Expected one writer a file. Fix: give each rank its own, as in "
            f'cache(f"{twice[0]}-{{kdist.rank()}}"), or cache in memory, or read the dataset through once before.'
        )


def _refuse_shards_of_shards(everyone: Sequence[_Told]) -> None:
    for rank, told in enumerate(everyone):
        if told.shards != everyone[0].shards:
            raise DataError(
                "Each rank would get a part of its own shard only, for kdist shares the data out. Received: a tf.data "
                f"pipeline with {_calls(everyone[0].shards)} on rank 0, and with {_calls(told.shards)} on rank {rank}. "
                "Expected the same pipeline on all ranks. Fix: leave `shard` out, or make the model in a scope "
                "with auto_shard=False."
            )


def _calls(shards: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"shard({num_shards}, {index})" for num_shards, index in shards) or "no shard"


def _warn_of_other_targets(everyone: Sequence[_Told], rank: int) -> None:
    others = [rank for rank, told in enumerate(everyone) if told.targets != everyone[0].targets]
    if others and rank == 0:
        logger.warning(
            "the first batch of rank(s) %s has other targets than that of rank 0. If it was shuffled before the scope, "
            "in another order on each rank, samples are lost, and others seen twice. Fix: make the data inside of "
            "kdist.scope(), or seed its shuffle; where each rank has data of its own, auto_shard=False. Targets drawn "
            "at random, as by mixup, may differ.",
            others,
        )
