"""How long an epoch takes: what the benchmarks of whole trainings measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any


def fastest_epoch(keras: Any, fit: Callable[..., Any], callbacks: Sequence[Any] = ()) -> float:
    """Calls `fit` and returns the seconds of its fastest epoch but the first: others only ever slow it.

    Args:
        keras: module, Keras or tf_keras, whichever the model is of.
        fit: callable, the model's `fit` with all arguments but the callbacks.
        callbacks: sequence of callbacks, included in the time.
    """

    class EpochTimes(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.started = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seconds.append(time.perf_counter() - self.started)

    times = EpochTimes()
    fit(callbacks=[*callbacks, times])
    return min(times.seconds[1:])
