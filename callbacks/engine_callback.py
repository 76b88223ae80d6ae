"""The base of callbacks that talk to the other ranks."""

from __future__ import annotations

import os

import keras

from kdist.cluster import detect
from kdist.engines.engine import Engine
from kdist.engines.single import SingleEngine
from kdist.errors import ScopeError


class EngineCallback(keras.callbacks.Callback):
    """A callback that all ranks run, and that talks to the others.

    Inside of `kdist.scope()` it finds the engine by the model. Without the scope it is told.

    Args:
        engine: `Engine` or `None`, how the ranks talk to each other: by default as those of the model's scope do.

    Attributes:
        is_collective: bool, whether `fit` compares over the ranks that all of them were given this callback.

    Raises:
        ScopeError: when it gets its model, if there are several ranks and nothing says how they talk to each other.
    """

    is_collective = True
    engine: Engine

    def __init__(self, engine: Engine | None = None) -> None:
        super().__init__()
        self._given_engine = engine

    def set_model(self, model: keras.Model) -> None:
        """Finds the engine by the model."""
        super().set_model(model)
        self.engine = self._given_engine or engine_of(model, type(self).__name__)

    def refuse_ranks_apart(self) -> None:
        """Raises where each rank trains by itself, for callbacks that look into steps that all ranks make together.

        Raises:
            ScopeError: with `sync_every`, or where no rank makes a step of its own.
        """
        refuse_other_strategies(self.model, type(self).__name__)
        replicated = self.model.__dict__.get("_kdist")
        if replicated is not None and replicated.averaging is not None:
            raise ScopeError(
                f"Ranks that train by themselves do not make the same steps. Received: {type(self).__name__} with "
                f"sync_every={replicated.settings.sync_every}. Expected gradients that are summed in each step. Fix: "
                f"leave {type(self).__name__} out, or sync_every."
            )


def refuse_other_strategies(model: keras.Model, who: str) -> None:
    """Raises where a training step is not one replica's of this process, for callbacks that look into it.

    Args:
        model: `keras.Model`.
        who: str, who looks, for the message.

    Raises:
        ScopeError: if the model trains on several devices of this process, on TPUs or on parameter servers' workers.
    """
    strategy = getattr(model, "distribute_strategy", None)
    is_of_one_replica = strategy is None or hasattr(strategy, "engine") or strategy.num_replicas_in_sync == 1
    kept = model.__dict__.get("_kdist")
    if not is_of_one_replica or not (kept is None or hasattr(kept, "averaging")):
        raise ScopeError(
            f"This callback looks into the step of one replica a process. Received: {who} and a model of "
            f"{type(strategy).__name__}. Expected a model that trains by all-reduce, or in one process on one device. "
            f"Fix: leave {who} out, or start one process for each device."
        )


def engine_of(model: keras.Model, who: str) -> Engine:
    """Returns the engine over which the ranks train a model.

    Args:
        model: `keras.Model`.
        who: str, who asks, for the message.

    Returns:
        That of the model's strategy; alone, or where each process trains for itself, the null engine.

    Raises:
        ScopeError: if there are several ranks and the model is in no scope.
    """
    strategy = getattr(model, "distribute_strategy", None)
    engine: Engine | None = getattr(strategy, "engine", None)
    if engine is not None:
        return engine
    info = detect(os.environ)
    if info.size == 1 or os.environ.get("KDIST_STRATEGY") == "single":
        return SingleEngine()
    raise ScopeError(
        f"{who} does not know how the ranks talk to each other. Received: {info.size} ranks ({info.reason}) and a "
        f"model of {type(strategy).__name__}, which has no engine. Expected a model that was made in kdist.scope() and "
        "trains by all-reduce, or an engine. Fix: make the model inside of kdist.scope(), or give "
        f"{who}(..., engine=...): the engine that your script uses, or kdist.engines.single.SingleEngine() where each "
        "process trains for itself."
    )
