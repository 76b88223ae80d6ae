"""A callback that runs another one on the chief only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from kdist.callbacks.engine_callback import engine_of
from kdist.engines.engine import Engine
from kdist.strategies.accumulation import read_state_between_steps


def _with_index(method: str) -> Callable[..., None]:
    def forward(self: ChiefOnly, index: int, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's method on the chief."""
        self._forward(method, index, logs)

    return forward


def _without_index(method: str) -> Callable[..., None]:
    def forward(self: ChiefOnly, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's method on the chief."""
        self._forward(method, logs)

    return forward


class ChiefOnly(keras.callbacks.Callback):
    """Runs a callback on the chief only.

    While it runs, collectives raise an error, as they would wait for the other ranks forever: `fit`, `evaluate` and
    `predict` of a model that several ranks train, and calls of the engine. It may read weights, metrics and the
    optimizer, save and export. It gets a copy of `logs`, so that logs are equal on all ranks. If it sets
    `stop_training`, all ranks stop in `kdist.scope()`.

    It may be given on all ranks or on the chief only.

    Args:
        callback: `keras.callbacks.Callback`.
        engine: `Engine` or `None`, how the ranks communicate: by default the engine of the model's scope.

    Raises:
        EngineError: from the callback, on the chief, if it starts a collective.
        ScopeError: when the model is set, if there are several ranks and no engine.

    Example:
    ```python
    model.fit(x, y, callbacks=[kdist.callbacks.ChiefOnly(PlotToFile("loss.png"))])
    ```
    """

    def __init__(self, callback: keras.callbacks.Callback, engine: Engine | None = None) -> None:
        super().__init__()
        self.callback = callback
        self.engine: Engine
        self._given_engine = engine

    def set_model(self, model: keras.Model) -> None:
        """Sets the model and the engine, here and in the callback."""
        super().set_model(model)
        self.engine = self._given_engine or engine_of(model, type(self).__name__)
        if self.engine.rank == 0:
            self.callback.set_model(model)

    def set_params(self, params: dict[str, Any]) -> None:
        """Sets the parameters, here and in the callback."""
        super().set_params(params)
        self.callback.set_params(params)

    @property
    def reads_state_between_steps(self) -> bool:
        """Whether the callback may read the model's state between two steps of an epoch."""
        return read_state_between_steps([self.callback])

    def _forward(self, method: str, *arguments: Any) -> None:
        if self.engine.rank != 0:
            return
        *index, logs = arguments
        who = f"ChiefOnly runs {type(self.callback).__name__}.{method} on the chief only"
        with self.engine.refusing(who):
            getattr(self.callback, method)(*index, None if logs is None else dict(logs))

    on_epoch_begin = _with_index("on_epoch_begin")
    on_epoch_end = _with_index("on_epoch_end")
    on_train_begin = _without_index("on_train_begin")
    on_train_end = _without_index("on_train_end")
    on_train_batch_begin = _with_index("on_train_batch_begin")
    on_train_batch_end = _with_index("on_train_batch_end")
    on_test_begin = _without_index("on_test_begin")
    on_test_end = _without_index("on_test_end")
    on_test_batch_begin = _with_index("on_test_batch_begin")
    on_test_batch_end = _with_index("on_test_batch_end")
    on_predict_begin = _without_index("on_predict_begin")
    on_predict_end = _without_index("on_predict_end")
    on_predict_batch_begin = _with_index("on_predict_batch_begin")
    on_predict_batch_end = _with_index("on_predict_batch_end")
