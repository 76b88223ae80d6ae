"""One state on all ranks, the root's."""

from __future__ import annotations

from typing import Any

import keras

from kdist.callbacks.engine_callback import EngineCallback
from kdist.engines.engine import Engine
from kdist.errors import NotSynchronizedError
from kdist.training.state import broadcast_state, variables_of


class BroadcastVariables(EngineCallback):
    """Gives all ranks the root's weights, optimizer variables and random states.

    That happens before the first step, at the beginning of each epoch, and when `evaluate` and `predict` begin, so
    that what one rank has loaded in the meantime is everyone's, or nobody's. Callbacks that restore a checkpoint when
    training begins belong before it in the list. `kdist.scope()` does the same by itself; this is for other loops,
    which may also call `broadcast()` after a load.

    Collective: every rank must call this, in the same order.

    Args:
        root: int, the rank whose values are taken.
        engine: `Engine` or `None`, how the ranks talk to each other: by default as those of the model's scope do.

    Raises:
        NotSynchronizedError: when training begins, if the model has no weights yet: each rank would begin with others.

    Example:
    ```python
    model.fit(x, y, callbacks=[kdist.callbacks.BroadcastVariables(engine=engine)])
    ```
    """

    def __init__(self, root: int = 0, engine: Engine | None = None) -> None:
        super().__init__(engine)
        self.root = root

    def broadcast(self) -> None:
        """Gives all ranks the root's state now.

        Collective: every rank must call this, in the same order.
        """
        broadcast_state(self.engine, variables_of(self.model), self.root)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Builds the optimizer, so that its variables exist, and gives all ranks the root's state."""
        if not self.model.built:
            raise NotSynchronizedError(
                f"The model has no weights to broadcast yet. Received: {type(self.model).__name__}, not built, when "
                "training begins. Expected weights before the first step: made in it, each rank would make others. "
                "Fix: give the model a keras.Input, or call model.build(input_shape) before fit."
            )
        optimizer = getattr(self.model, "optimizer", None)
        if isinstance(optimizer, keras.optimizers.Optimizer) and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self.broadcast()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Gives all ranks the root's state: a callback may have loaded another one at the end of the last epoch."""
        self.broadcast()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Gives all ranks the root's state."""
        self.broadcast()

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Gives all ranks the root's state."""
        self.broadcast()
