"""The base of callbacks that communicate with the other ranks."""

from __future__ import annotations

import os

import keras

from kdist.cluster import detect
from kdist.engines.engine import Engine
from kdist.engines.single import SingleEngine
from kdist.errors import ScopeError
from kdist.reports.scope_marks import own_scopes


class EngineCallback(keras.callbacks.Callback):
    """A callback that all ranks run, and that communicates with the others.

    In `kdist.scope()` it uses the engine of the model. Without the scope an engine must be given.

    Args:
        engine: `Engine` or `None`, how the ranks communicate: by default the engine of the model's scope.

    Attributes:
        is_collective: bool, whether `fit` checks that all ranks were given this callback.

    Raises:
        ScopeError: when the model is set, if there are several ranks and no engine.
    """

    is_collective = True
    engine: Engine

    def __init__(self, engine: Engine | None = None) -> None:
        super().__init__()
        self._given_engine = engine

    def set_model(self, model: keras.Model) -> None:
        """Sets the model and the engine."""
        super().set_model(model)
        self.engine = self._given_engine or engine_of(model, type(self).__name__)


def engine_of(model: keras.Model, who: str) -> Engine:
    """Returns the engine over which the ranks train a model.

    Args:
        model: `keras.Model`.
        who: str, the callback, for the message.

    Returns:
        The engine of the model's strategy; `SingleEngine` in one process and where processes train by themselves, as
        with `KDIST_STRATEGY=single`.

    Raises:
        ScopeError: if there are several ranks and the model is in no scope.
    """
    strategy = getattr(model, "distribute_strategy", None)
    engine: Engine | None = getattr(strategy, "engine", None)
    if engine is not None:
        return engine
    info = detect(os.environ)
    if info.size == 1 or own_scopes.trains_alone or os.environ.get("KDIST_STRATEGY") == "single":
        return SingleEngine()
    raise ScopeError(
        f"{who} has no engine. Received: {info.size} ranks ({info.reason}) and a "
        f"model of {type(strategy).__name__}, which has none. Expected a model of a kdist.scope() with all-reduce, or "
        f"an engine. Fix: make the model in kdist.scope(), or give {who}(..., engine=...): the engine of your script, "
        "or kdist.engines.single.SingleEngine() for independent processes."
    )
