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
            ScopeError: with `sync_every`.
        """
        replicated = self.model.__dict__.get("_kdist")
        if replicated is not None and replicated.averaging is not None:
            raise ScopeError(
                f"Ranks that train by themselves do not make the same steps. Received: {type(self).__name__} with "
                f"sync_every={replicated.settings.sync_every}. Expected gradients that are summed in each step. Fix: "
                f"leave {type(self).__name__} out, or sync_every."
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
