"""A periodic comparison of the state of all ranks."""

from __future__ import annotations

import logging
from typing import Any, Literal

from kdist.callbacks.engine_callback import EngineCallback
from kdist.engines.engine import Engine
from kdist.errors import NotSynchronizedError, StrategyError
from kdist.keras_hooks.variables import is_declared_of_one_rank
from kdist.state.broadcast import broadcast_state
from kdist.state.comparison import first_difference
from kdist.state.part import Placement
from kdist.state.session import session_of

logger = logging.getLogger("kdist")

ACTIONS = ("raise", "warn", "repair")


class ReplicaCheck(EngineCallback):
    """Compares the state of all ranks periodically, by a checksum of each variable.

    Weights, statistics, random states and optimizer variables must be equal bit for bit. The message names the first
    variable that differs, and the ranks.

    Collective: every rank must call this, in the same order.

    Args:
        every: int, the steps between two comparisons.
        action: what to do if ranks differ: `"raise"` on all ranks; `"warn"`: log a warning; `"repair"`: log it
            and broadcast the state of a rank with the most frequent value.
        engine: `Engine` or `None`, how the ranks communicate: by default the engine of the model's scope.

    Raises:
        NotSynchronizedError: on all ranks, if ranks differ and `action="raise"`.
        ScopeError: when the model is set, if there are several ranks and no engine; when training begins, if the model
            trains on several devices of this process, with parameter servers, or without whole gradients in each step.
        StrategyError: if `every` or `action` is invalid.

    Example:
    ```python
    model.fit(x, y, callbacks=[kdist.callbacks.ReplicaCheck(every=100)])
    ```
    """

    def __init__(
        self, every: int = 100, action: Literal["raise", "warn", "repair"] = "raise", engine: Engine | None = None
    ) -> None:
        if action not in ACTIONS or every < 1:
            raise StrategyError(
                f"An argument of ReplicaCheck is invalid. Received: every={every!r}, action={action!r}. Expected a "
                f"positive number of steps, and one of {', '.join(map(repr, ACTIONS))}. Fix: change the argument."
            )
        super().__init__(engine)
        self.every = every
        self.action = action
        self._num_steps = 0
        self._last_batch = -1

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resets the count."""
        session_of(self.model).check_step_extension(type(self).__name__, joint=True)
        self._num_steps = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins an epoch."""
        self._last_batch = -1

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Finds the first step of a resumed epoch."""
        self._last_batch = max(self._last_batch, batch - 1)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares every `every` steps."""
        before = self._num_steps // self.every
        self._num_steps += batch - self._last_batch
        self._last_batch = batch
        if self._num_steps // self.every > before:
            self.check()

    def check(self) -> None:
        """Compares now.

        Collective: every rank must call this, in the same order.
        """
        variables = self._variables()
        found = first_difference(self.engine, variables)
        if found is None or session_of(self.model).weights_are_pending():
            return
        variable = variables[found.place]
        message = (
            f"The states of the ranks differ. Received: after {self._num_steps} steps, other values of "
            f"{getattr(variable, 'path', variable.name)!r} on rank(s) {found.ranks} than on rank {found.root}"
        )
        if self.action == "raise":
            raise NotSynchronizedError(
                f"{message}. Expected equal bits on all {self.engine.size} ranks. Fix: look for code of one rank only: "
                "a callback that assigns to weights, a load, an update without a reduction, faulty memory."
            )
        if self.engine.rank == 0:
            logger.warning(
                "%s%s", message, self.action == "repair" and f"; rank {found.root} broadcasts its state" or ""
            )
        if self.action == "repair":
            broadcast_state(self.engine, variables, found.root)

    def _variables(self) -> list[Any]:
        session = session_of(self.model)
        pending = {id(variable) for variable in session.pending_variables()}
        whole = [part for part in session.parts() if part.placement is Placement.WHOLE]
        return [
            each
            for part in whole
            for each in part.variables()
            if id(each) not in pending and not is_declared_of_one_rank(each)
        ]
