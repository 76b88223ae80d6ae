"""One pass over data whose steps workers make: what is under way, and what is known of it by now."""

from __future__ import annotations

import collections
import functools
import logging
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from kdist.training.scheduled_data import Feed

if TYPE_CHECKING:
    from kdist.training.scheduled_model import ScheduledModel

logger = logging.getLogger("kdist")

IN_FLIGHT = 4
"""How many executions wait or run, for each worker."""

_REFRESH = 0.1  # seconds for which a batch's logs are shown again: to compute them takes longer than a small step


class Pass:
    """One pass over data whose steps write metrics.

    Args:
        owner: `ScheduledModel`.
        kind: str, `"train"` or `"test"`.
    """

    def __init__(self, owner: ScheduledModel, kind: str) -> None:
        self._owner = owner
        self._kind = kind
        self._variables = list(owner.model.metrics_variables)
        self._starts = [variable.value.numpy() for variable in self._variables]
        self._totals = [np.zeros(start.shape) for start in self._starts]
        self._layout: Any = None
        self._others: dict[str, float] = {}
        self._in_flight = 0
        self._num_scheduled = 0
        self._last_taken = 0
        self._logs: Any = {}
        self._logs_at = 0.0
        self.staleness: collections.Counter[int] = collections.Counter()

    def schedule(self, feed: Feed, batches: list[list[tf.Tensor]]) -> None:
        """Hands out one execution, once there is room for it."""
        dispatcher, options = self._owner.dispatcher, self._owner.options
        function, layout = self._owner.traced(self._kind, feed, len(batches), self._starts)
        is_warming_up = self._kind == "train" and self._num_scheduled < options.warmup_steps
        limit = 1 if is_warming_up else IN_FLIGHT * dispatcher.num_workers
        while self._in_flight >= limit:
            dispatcher.take_one(wait=True)
        self._in_flight += 1
        self._num_scheduled += len(batches)
        self._layout = layout
        flat = [tensor for batch in batches for tensor in batch]
        dispatcher.submit(function, flat, feed.resident, functools.partial(self._take, layout, self._num_scheduled))
        while dispatcher.take_one(wait=False):
            pass

    def _take(self, layout: Any, number: int, outputs: list[np.ndarray]) -> None:
        added, others, staleness = layout.split(outputs[0])
        if number > self._last_taken:  # what is no metric is the last batch's, as in one process
            self._last_taken, self._others = number, others
        for total, part in zip(self._totals, added, strict=True):
            total += part
        self.staleness.update(int(each) for each in staleness if each >= 0)
        self._in_flight -= 1

    def finish(self) -> None:
        """Waits for all that was handed out."""
        while self._in_flight:
            self._owner.dispatcher.take_one(wait=True)

    def logs(self, *, now: bool = False) -> Any:
        """Returns what is known by now, as the user's step would have returned it."""
        if now or time.monotonic() > self._logs_at + _REFRESH:
            self._logs = self._computed()
            self._logs_at = time.monotonic()
        return dict(self._logs)

    def _computed(self) -> dict[str, Any]:
        for variable, start, total in zip(self._variables, self._starts, self._totals, strict=True):
            variable.assign((start + total).astype(start.dtype))
        layout = self._layout
        if layout is None:
            return {}
        return {
            key: layout.results[key]() if key in layout.results else self._others.get(key, 0.0) for key in layout.order
        }

    def epoch_logs(self) -> dict[str, Any]:
        """Returns the logs of the whole pass, with its staleness."""
        logs = dict(self.logs(now=True))
        if self.staleness:
            logs |= staleness_logs(self.staleness, self._owner.dispatcher.num_workers)
            logger.info(
                "%d updates by their staleness: %s",
                self.staleness.total(),
                ", ".join(f"{each} ({count} times)" for each, count in sorted(self.staleness.items())),
            )
        return logs


def staleness_logs(counts: Mapping[int, int], num_workers: int) -> dict[str, float]:
    """Returns the staleness of some updates as numbers with names.

    Callbacks want the same names in each epoch, and a number for each: so the bins are those of the workers' number.

    Args:
        counts: mapping of staleness to the number of updates that had it; at least one.
        num_workers: int. N workers in step make updates of a staleness of N - 1.

    Returns:
        A dictionary of `staleness_mean`, `staleness_max`, and the number of updates in each bin of the histogram. The
        bins are 0, 1, 2 to 3, 4 to 7, and so on; the last one is open, and begins at 2N or above.
    """
    total = sum(counts.values())
    logs = {
        "staleness_mean": sum(each * count for each, count in counts.items()) / total,
        "staleness_max": float(max(counts)),
    }
    bounds = [0, 1]
    while bounds[-1] < 2 * num_workers:
        bounds.append(2 * bounds[-1])
    for first, after in zip(bounds, [*bounds[1:], math.inf], strict=True):
        last = "_and_more" if after == math.inf else f"_to_{after - 1}" if after > first + 1 else ""
        logs[f"staleness_{first}{last}"] = float(sum(n for each, n in counts.items() if first <= each < after))
    return logs
