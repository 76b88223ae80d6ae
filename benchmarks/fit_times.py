"""How long the steps, the epoch and the whole call of a `fit` take."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class FitTimes:
    """Seconds a step of a `fit` of one epoch, measured in three ways.

    Attributes:
        steady: float, the median time between the ends of two batches.
        epoch: float, the time from the epoch's beginning to its end, divided by the number of steps.
        fit: float, the time from the call to its return, divided by the number of steps. Plain Keras waits in it for
            `tf.data` to end its threads.
    """

    steady: float
    epoch: float
    fit: float


def measure(called: float, begun: float, ends: Sequence[float], ended: float, returned: float) -> FitTimes:
    """Returns the times of a fit.

    Args:
        called: float, when `fit` was called, in seconds, as all others.
        begun: float, when the epoch began.
        ends: sequence of float, when each batch ended; at least two.
        ended: float, when the epoch ended.
        returned: float, when `fit` returned.
    """
    steps = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    return FitTimes(statistics.median(steps), (ended - begun) / len(ends), (returned - called) / len(ends))


def timed_fit(keras: Any, fit: Callable[..., Any], callbacks: Sequence[Any] = ()) -> FitTimes:
    """Calls `fit`, of one epoch, and returns its times.

    Args:
        keras: module, Keras or tf_keras, whichever the model is of.
        fit: callable, the model's `fit` with all arguments but the callbacks.
        callbacks: sequence of callbacks, included in the times.
    """

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        reads_state_between_steps = False  # kdist need not agree on a stop after each step

        def __init__(self) -> None:
            super().__init__()
            self.ends: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begun = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.ended = time.perf_counter()

    clock = Clock()
    called = time.perf_counter()
    fit(callbacks=[*callbacks, clock])
    return measure(called, clock.begun, clock.ends, clock.ended, time.perf_counter())
