"""The average over the ranks of logs that each rank has computed from its own samples."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kdist.callbacks.engine_callback import EngineCallback
from kdist.engines.engine import Engine
from kdist.errors import MismatchError
from kdist.keras_hooks.trainer import loss_tracker


class MetricAverage(EngineCallback):
    """Averages the epoch's logs over the ranks, weighted by their numbers of samples.

    The average is `sum(n * v) / sum(n)` over the ranks that have the key: `v` is a rank's value, `n` its number of
    samples. All ranks have all keys afterwards, with the same values. It is for metrics outside of the model: callbacks
    that add such values to `logs` must come before this one in the list, and callbacks that read `logs` after it.
    Keras' metrics are exact in `kdist.scope()` without it, and are not changed.

    Collective: every rank must call this, in the same order.

    Args:
        num_samples: number, or callable without arguments that returns one: the samples of this rank's logs. By default
            the model's loss metric counts them, those of the validation for keys that begin with `val_`.
        engine: `Engine` or `None`, how the ranks communicate: by default the engine of the model's scope.

    Raises:
        MismatchError: on all ranks, at the end of an epoch, if a key has different values and no samples.
        ScopeError: when the model is set, if there are several ranks and no engine.

    Example:
    ```python
    model.fit(x, y, callbacks=[MyMetric(), kdist.callbacks.MetricAverage(), keras.callbacks.CSVLogger("log.csv")])
    ```
    """

    def __init__(self, num_samples: float | Callable[[], float] | None = None, engine: Engine | None = None) -> None:
        super().__init__(engine)
        self._num_samples = num_samples
        self._counted = {"train": 0.0, "val": 0.0}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Resets the counts."""
        self._counted = {"train": 0.0, "val": 0.0}

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the epoch's samples, before metrics are summed over the ranks."""
        self._count("train")

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the validation's samples."""
        self._count("val")

    def _count(self, part: str) -> None:
        if self._num_samples is None:
            tracker = loss_tracker(self.model)  # custom steps may not update it
            self._counted[part] = 0.0 if tracker is None else float(tracker.count)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the averages into the logs."""
        if logs is None:
            return
        local = {key: [float(value), self._weight(key)] for key, value in logs.items() if _is_number(value)}
        by_rank = [dict(items) for items in self.engine.gather_objects(sorted(local.items()))]
        for key in sorted({key for items in by_rank for key in items}):
            logs[key] = _mean(key, [items[key] for items in by_rank if key in items])

    def _weight(self, key: str) -> float:
        if self._num_samples is not None:
            return float(self._num_samples() if callable(self._num_samples) else self._num_samples)
        return self._counted["val" if key.startswith("val_") else "train"]


def _is_number(value: Any) -> bool:
    return np.ndim(value) == 0 and isinstance(np.asarray(value).item(), numbers.Real)


def _mean(key: str, pairs: Sequence[Sequence[float]]) -> float:
    """Returns the weighted mean of `(value, weight)` pairs; equal values, also NaNs, need no weights."""
    values = [value for value, _ in pairs]
    if all(value == values[0] for value in values) or all(map(math.isnan, values)):
        return values[0]
    total = math.fsum(weight for _, weight in pairs)
    if total <= 0:
        raise MismatchError(
            f"MetricAverage cannot weight the values of {key!r}. Received: {values}, with 0 samples on every rank that "
            "has it. Expected the number of samples of each value: a custom training step does not update the loss "
            "metric, or there was no validation. Fix: use MetricAverage(num_samples=...)."
        )
    return math.fsum(value * weight for value, weight in pairs if weight > 0) / total
