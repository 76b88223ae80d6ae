"""Logs that each rank has made from its own samples, averaged."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kdist.callbacks.engine_callback import EngineCallback
from kdist.callbacks.row_count import rows_of_pass
from kdist.engines.engine import Engine
from kdist.errors import MismatchError


class MetricAverage(EngineCallback):
    r"""Averages the epoch's logs over the ranks, each by the samples that it is made from.

    $\bar v = \sum_r n_r v_r / \sum_r n_r$, over the ranks $r$ that have the key. All ranks have all keys afterwards,
    with the same values. It is meant for metrics that live outside of the model: a callback that adds to `logs` what
    it has computed from its rank's samples belongs before this one in the list, and callbacks that read `logs` after
    it. Keras' own metrics are exact in `kdist.scope()` without it, and are left as they are.

    Collective: every rank must call this, in the same order.

    Args:
        num_samples: number, or callable without arguments that returns one: the samples behind this rank's logs. By
            default they are counted by the model's loss metric, those of the validation for keys that begin with
            `val_`.
        engine: `Engine` or `None`, how the ranks talk to each other: by default as those of the model's scope do.

    Raises:
        MismatchError: on all ranks, at the end of an epoch, if a key has different values and no samples.

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
        """Begins to count."""
        self._counted = {"train": 0.0, "val": 0.0}

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the epoch's samples: afterwards the model's metrics may be everyone's."""
        self._count("train")

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the validation's samples."""
        self._count("val")

    def _count(self, part: str) -> None:
        if self._num_samples is None:
            self._counted[part] = rows_of_pass(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts the averages into the logs."""
        if logs is None:
            return
        mine = {key: [float(value), self._weight(key)] for key, value in logs.items() if _is_number(value)}
        everyone = self.engine.gather_objects(sorted(mine.items()))
        by_rank = [dict(items) for items in everyone]
        for key in sorted({key for items in by_rank for key in items}):
            logs[key] = _mean(key, [items[key] for items in by_rank if key in items])

    def _weight(self, key: str) -> float:
        if self._num_samples is not None:
            return float(self._num_samples() if callable(self._num_samples) else self._num_samples)
        return self._counted["val" if key.startswith("val_") else "train"]


def _is_number(value: Any) -> bool:
    return np.ndim(value) == 0 and isinstance(np.asarray(value).item(), numbers.Real)


def _mean(key: str, said: Sequence[Sequence[float]]) -> float:
    """Returns the mean of the values, by their weights; what all say, where all say the same."""
    values = [value for value, _ in said]
    if all(value == values[0] for value in values):
        return values[0]
    total = math.fsum(weight for _, weight in said)
    if total <= 0:
        raise MismatchError(
            f"MetricAverage cannot weight the values of {key!r}. Received: {values}, with 0 samples on every rank that "
            "has it. Expected to know of how many samples each is made: the model's own training step does not update "
            "its loss metric, or there was no validation. Fix: MetricAverage(num_samples=...)."
        )
    return math.fsum(value * weight for value, weight in said if weight > 0) / total
