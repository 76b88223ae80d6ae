"""What scripts keep of other libraries for several processes, and what a scope has no use for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kdist.errors import StrategyError


def refuse_parts_of_horovod(optimizers: Iterable[Any], callbacks: Any) -> None:
    """Refuses Horovod's optimizers and callbacks, which call what Keras 3 has not.

    Args:
        optimizers: iterable of optimizers.
        callbacks: one callback, a list of them, or `None`.

    Raises:
        StrategyError: if one of them is Horovod's.
    """
    given = getattr(callbacks, "callbacks", callbacks) or ()  # of a `CallbackList`
    listed = given if isinstance(given, (list, tuple)) else [given]
    named = [("DistributedOptimizer", each) for each in optimizers] + [(type(each).__name__, each) for each in listed]
    for name, each in named:
        module = next((base.__module__ for base in type(each).__mro__ if base.__module__.startswith("horovod.")), "")
        if module:
            raise StrategyError(
                f"Horovod's {name} does not run in kdist.scope(). Received: an object of {module}. Expected Keras' own "
                "optimizers and callbacks: gradients are reduced, weights are broadcast, and metrics are those of all "
                f"ranks. Fix: leave {name} out, or use what docs/migrating_from_horovod.md names for it."
            )
