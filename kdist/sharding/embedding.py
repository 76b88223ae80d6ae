"""`Embedding` layers that are made in a scope with `shard_embeddings`: large tables are in parts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import keras
import tensorflow as tf

from kdist.errors import StrategyError
from kdist.keras_hooks.layers.embedding import (
    built_by,
    has_plain_lookup,
    make_table,
    refusal_reasons,
    set_lookup,
    table_of,
)
from kdist.keras_hooks.trainer import layers_of
from kdist.reports.log import once
from kdist.sharding.initial_rows import initial_rows
from kdist.sharding.row_files import save_by_rows
from kdist.sharding.row_rules import whole_table_rules
from kdist.sharding.table import Table
from kdist.strategies.all_reduce import AllReduceStrategy

logger = logging.getLogger("kdist")


@contextlib.contextmanager
def tables_in_parts(strategy: AllReduceStrategy, num_bytes: float | None) -> Iterator[None]:
    """Makes layers hold their tables in parts while the context is open, from a number of bytes on.

    Args:
        strategy: `AllReduceStrategy`.
        num_bytes: float, or `None` for no table.
    """

    def build(layer: keras.layers.Embedding) -> bool:
        return num_bytes is not None and _build(layer, strategy, num_bytes)

    with built_by(build) if num_bytes is not None else contextlib.nullcontext():
        yield


def _build(layer: keras.layers.Embedding, strategy: AllReduceStrategy, num_bytes: float) -> bool:
    """Builds a layer if its table is large; returns whether it is."""
    engine, shape, size = strategy.engine, (layer.input_dim, layer.output_dim), _num_bytes(layer)
    if size < num_bytes or shape[0] < engine.size:
        return False
    if not has_plain_lookup(layer):
        if engine.rank == 0:
            logger.warning(
                "the table of %r, %s bytes, is whole on each rank (shard_embeddings): the class %s has a lookup of its "
                "own",
                layer.name, f"{size:,}", type(layer).__name__,
            )  # fmt: skip
        return False
    if reasons := [*whole_table_rules(layer), *refusal_reasons(layer)]:
        raise StrategyError(
            f"shard_embeddings does not support {reasons[0]}, which needs the whole table. Received: the layer "
            f"{layer.name!r}, of {size:,} bytes, with {', '.join(reasons)}. Expected a layer without; of regularizers "
            "L1, L2 or L1L2, of constraints NonNeg, or MaxNorm, UnitNorm or MinMaxNorm with axis=1, a row by itself. "
            f"Fix: use one of these, remove it, or set shard_embeddings above {size:,}."
        )
    rank, ranks = engine.rank, engine.size
    make_table(
        layer,
        lambda dtype: initial_rows(layer.embeddings_initializer, shape, dtype, ranks, rank),
        lambda rows, sign: Table(strategy, shape, rows, layer.embeddings_regularizer, sign),
    )
    save_by_rows(layer)
    set_lookup(layer, lambda table, ids: table.look_up(ids, layer.name))
    return True


def warn_of_whole_tables(model: keras.Model, size: int, num_bytes: float | None) -> None:
    """Warns once of large tables that are whole, as those of layers that were built outside of the scope.

    Args:
        model: `keras.Model`.
        size: int, the number of ranks.
        num_bytes: float, from which on tables are in parts, or `None`.
    """
    if num_bytes is None:
        return
    for layer in [each for each in layers_of(model) if isinstance(each, keras.layers.Embedding) and each.built]:
        is_whole = has_plain_lookup(layer) and not any(map(table_of, layer.weights))
        if is_whole and _num_bytes(layer) >= num_bytes and layer.input_dim >= size:
            once.warning(
                f"the table of {layer.name!r}, {_num_bytes(layer):,} bytes, is whole on each rank (shard_embeddings): "
                "the layer was built outside of kdist.scope(). Fix: make it, or load its model, in the scope; a model "
                "without keras.Input is built there by model.build(...)"
            )


def _num_bytes(layer: keras.layers.Embedding) -> int:
    return int(layer.input_dim * layer.output_dim * tf.as_dtype(layer.variable_dtype).size)
