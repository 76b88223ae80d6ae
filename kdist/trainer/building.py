"""Builds a model and its optimizers for the first batch: on each rank the same."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from kdist.errors import StrategyError
from kdist.keras_hooks.metrics import build_shapes_recorded
from kdist.keras_hooks.optimizers import innermost, not_built, optimizers_of, set_optimizer_strategy
from kdist.keras_hooks.patching import original
from kdist.keras_hooks.trainer import (
    SYMBOLIC_BUILD,
    build_eagerly,
    build_layers,
    has_custom_steps,
    is_built,
    keeps_states_of_one_row,
    runs_eagerly,
    tensor_names_kept,
)
from kdist.sharding.optimizer import shard, sharded
from kdist.trainer.feeding.given_rows import with_one_row
from kdist.trainer.replicated_session import ReplicatedSession


def prepare_optimizers(session: ReplicatedSession) -> None:
    """Makes a model's optimizers those of its scope, with sharded slots if it asks for that."""
    for optimizer in optimizers_of(session.model):
        # An optimizer of another scope could not make its slots here.
        set_optimizer_strategy(optimizer, session.strategy)
        for each in (innermost(optimizer), optimizer):
            shard(each, session.engine, session.options)
        if not session.options.in_parts and sharded(optimizer) is not None:
            raise StrategyError(
                f"The optimizer is of another scope than its model. Received: {type(optimizer).__name__} of a "
                'scope with shard="optimizer", for a model of one without. Expected one scope. Fix: make the model '
                "and its optimizer in the same kdist.scope()."
            )


def build(session: ReplicatedSession, iterator: Any, batch: Any) -> None:
    """Builds what is not built yet of a model, its metrics and its optimizers; see Keras' `_symbolic_build`.

    Args:
        session: `ReplicatedSession` of the model.
        iterator: Keras' epoch iterator, or `None`.
        batch: structure of tensors, or `None`: the batch of `iterator`.
    """
    model = session.model
    try:
        _build(session, iterator, with_one_row(batch) if keeps_states_of_one_row(model) else batch)
    except Exception:
        # Without a strategy Keras does not call the model here; one with custom steps may not be callable, and
        # Keras takes sparse targets for dense ones.
        sparse = (tf.SparseTensor, tf.SparseTensorSpec)
        if not has_custom_steps(model) and not any(isinstance(x, sparse) for x in tf.nest.flatten(batch)):
            raise


def _build(session: ReplicatedSession, iterator: Any, batch: Any) -> None:
    model = session.model
    if batch is not None and runs_eagerly(model):
        if not all(is_built(model)):
            with session.strategy.scope():
                build_eagerly(model, batch)
        return
    if batch is not None and not is_built(model)[0]:
        with session.strategy.scope(), contextlib.suppress(Exception):  # Keras' own build then explains it
            build_layers(model, batch)
    # A step of the user's own may update other variables than the model's: the first update builds the optimizer.
    builds = not has_custom_steps(model)
    with (
        tensor_names_kept(),
        contextlib.nullcontext() if builds else not_built(optimizers_of(model)),
        contextlib.nullcontext() if builds else build_shapes_recorded(model),
    ):
        original(model, SYMBOLIC_BUILD)(iterator=iterator, data_batch=batch)
