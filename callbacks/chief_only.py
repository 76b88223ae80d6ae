"""Any callback, run on one rank without danger."""

from __future__ import annotations

from typing import Any

import keras

from kdist.callbacks.engine_callback import engine_of
from kdist.engines.engine import Engine
from kdist.training.deferred_sums import look_between_steps


class ChiefOnly(keras.callbacks.Callback):
    """Runs a callback on the chief alone.

    While it runs, what would wait for the other ranks for ever is refused with an explanation: `fit`, `evaluate` and
    `predict` of a model that several ranks train, and calls of the engine. Reading weights, metrics and the
    optimizer, saving and exporting are allowed. What the callback writes into `logs` stays its own, so that logs are
    the same on all ranks. It may ask to stop: `kdist.scope()` lets all ranks agree.

    It may be given on all ranks or on the chief alone.

    Args:
        callback: `keras.callbacks.Callback`.
        engine: `Engine` or `None`, how the ranks talk to each other: by default as those of the model's scope do.

    Raises:
        EngineError: from the callback, on the chief, if it starts a collective.

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
        """Finds the engine by the model, and hands the model on."""
        super().set_model(model)
        self.engine = self._given_engine or engine_of(model, type(self).__name__)
        if self.engine.rank == 0:
            self.callback.set_model(model)

    def set_params(self, params: dict[str, Any]) -> None:
        """Hands the parameters on; they come before the model as well as after it."""
        super().set_params(params)
        self.callback.set_params(params)

    @property
    def reads_state_between_steps(self) -> bool:
        """Whether the callback may look at the model between two steps of an epoch."""
        return look_between_steps([self.callback])

    def _forward(self, method: str, *arguments: Any) -> None:
        if self.engine.rank != 0:
            return
        *place, logs = arguments
        who = f"ChiefOnly runs {type(self.callback).__name__}.{method} on the chief alone"
        with self.engine.refusing(who):
            getattr(self.callback, method)(*place, None if logs is None else dict(logs))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's own on the chief."""
        self._forward("on_epoch_begin", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's own on the chief."""
        self._forward("on_epoch_end", epoch, logs)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's own on the chief."""
        self._forward("on_train_begin", logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's own on the chief."""
        self._forward("on_train_end", logs)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's own on the chief."""
        self._forward("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's own on the chief."""
        self._forward("on_train_batch_end", batch, logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's own on the chief."""
        self._forward("on_test_begin", logs)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's own on the chief."""
        self._forward("on_test_end", logs)

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's own on the chief."""
        self._forward("on_test_batch_begin", batch, logs)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's own on the chief."""
        self._forward("on_test_batch_end", batch, logs)

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's own on the chief."""
        self._forward("on_predict_begin", logs)

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's own on the chief."""
        self._forward("on_predict_end", logs)

    def on_predict_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's own on the chief."""
        self._forward("on_predict_batch_begin", batch, logs)

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Runs the callback's own on the chief."""
        self._forward("on_predict_batch_end", batch, logs)
