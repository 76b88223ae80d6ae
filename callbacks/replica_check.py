"""Whether all ranks still hold the same, now and then."""

from __future__ import annotations

import logging
from typing import Any

from kdist.callbacks.engine_callback import EngineCallback
from kdist.engines.engine import Engine
from kdist.errors import NotSynchronizedError, StrategyError
from kdist.training.optimizers import innermost, optimizers_of
from kdist.training.state import broadcast_state, first_difference, variables_of

logger = logging.getLogger("kdist")

ACTIONS = ("raise", "warn", "repair")


class ReplicaCheck(EngineCallback):
    """Compares the state of all ranks every so many steps, by a checksum of each variable.

    Weights, statistics, random states and optimizer variables must be equal bit for bit. The first variable that is
    not, and the ranks that differ from most others, are named.

    Collective: every rank must call this, in the same order.

    Args:
        every: int, the steps between two comparisons.
        action: what happens if ranks differ: `"raise"` raises on all ranks; `"warn"` logs a warning; `"repair"` logs
            it and gives all ranks the state of one that has what most have.
        engine: `Engine` or `None`, how the ranks talk to each other: by default as those of the model's scope do.

    Raises:
        NotSynchronizedError: on all ranks, in the step in which ranks are found to differ.
        StrategyError: if `every` or `action` is not understood.

    Example:
    ```python
    model.fit(x, y, callbacks=[kdist.callbacks.ReplicaCheck(every=100)])
    ```
    """

    def __init__(self, every: int = 100, action: str = "raise", engine: Engine | None = None) -> None:
        if action not in ACTIONS or every < 1:
            raise StrategyError(
                f"ReplicaCheck does not know what to do. Received: every={every!r}, action={action!r}. Expected a "
                f"number of steps from 1, and one of {', '.join(map(repr, ACTIONS))}. Fix: choose one of these."
            )
        super().__init__(engine)
        self.every = every
        self.action = action
        self._num_steps = 0
        self._last_batch = -1

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to count."""
        self.refuse_ranks_apart()
        self._num_steps = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins an epoch."""
        self._last_batch = -1

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where a resumed epoch begins."""
        self._last_batch = max(self._last_batch, batch - 1)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares, when so many steps are made."""
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
        if found is None or self._weights_are_on_their_way():
            return
        variable = variables[found.place]
        message = (
            f"The ranks do not hold the same. Received: after {self._num_steps} steps, other values of "
            f"{getattr(variable, 'path', variable.name)!r} on rank(s) {found.ranks} than on rank {found.root}"
        )
        if self.action == "raise":
            raise NotSynchronizedError(
                f"{message}. Expected all of {self.engine.size} ranks to be equal bit for bit. Fix: look for what one "
                "rank does alone: a callback that assigns to weights, a load, an update without a reduction, or for "
                "memory that fails."
            )
        if self.engine.rank == 0:
            logger.warning("%s%s", message, self.action == "repair" and f"; all take rank {found.root}'s state" or "")
        if self.action == "repair":
            broadcast_state(self.engine, variables, found.root)

    def _weights_are_on_their_way(self) -> bool:
        """Whether a rank has loaded weights that the scope gives to all ranks in the next step."""
        replicated = self.model.__dict__.get("_kdist")
        if replicated is None:
            return False
        requests = replicated.requests
        return any(self.engine.gather_objects(requests.asks("weights") or "weights" in requests.granted))

    def _variables(self) -> list[Any]:
        variables = variables_of(self.model)
        if "_kdist" not in self.model.__dict__:
            return variables
        # In the scope a rank may hold another rate until the next step's message tells the others.
        rates = {id(innermost(optimizer)._learning_rate) for optimizer in optimizers_of(self.model)}
        return [variable for variable in variables if id(variable) not in rates]
