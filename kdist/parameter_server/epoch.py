"""One pass over data whose steps run on workers: the steps in flight, and the logs of those that have finished."""

from __future__ import annotations

import collections
import functools
import logging
import time
from typing import Any

import numpy as np

from kdist.keras_hooks.trainer import is_overridden
from kdist.parameter_server.dispatch import Dispatcher
from kdist.parameter_server.feed import WorkerBatch
from kdist.parameter_server.functions import WorkerFunctions
from kdist.parameter_server.staleness import staleness_logs
from kdist.parameter_server.step import Layout
from kdist.reports.log import once

logger = logging.getLogger("kdist")

_LOGS_INTERVAL = 0.1  # seconds for which a batch's logs are returned again: computing them outlasts a small step


class DispatchedEpoch:
    """One pass over data whose steps write metrics.

    Args:
        dispatcher: `Dispatcher`.
        functions: `WorkerFunctions` of the model, whose metrics were just reset.
        kind: str, `"train"` or `"test"`.
        warmup_steps: int, how many first steps are made one at a time.

    Attributes:
        num_scheduled: int, the steps so far.
    """

    def __init__(self, dispatcher: Dispatcher, functions: WorkerFunctions, kind: str, warmup_steps: int) -> None:
        self._dispatcher = dispatcher
        self._functions = functions
        self._kind = kind
        self._warmup_steps = warmup_steps
        self._variables = list(functions.model.metrics_variables)
        self._starts = [variable.value.numpy() for variable in self._variables]
        self._totals = [np.zeros(start.shape) for start in self._starts]
        self._staleness: collections.Counter[int] = collections.Counter()
        self._num_in_flight = 0
        self.num_scheduled = 0
        self._is_written = True  # whether the metrics' variables hold all that is scheduled
        self._layout: Layout | None = None
        self._last_step = 0
        self._logs_of_last_step: dict[str, float] = {}
        self._logs: dict[str, Any] = {}
        self._logs_at = 0.0

    def resume(self) -> None:
        """Begins with what the metrics' variables hold now: the steps before an interruption."""
        for variable, start, total in zip(self._variables, self._starts, self._totals, strict=True):
            total += variable.value.numpy()
            total -= start

    def schedule(self, batches: list[WorkerBatch]) -> None:
        """Schedules one execution of some steps, as soon as there are not too many in flight."""
        feed = batches[0].feed
        function, layout = self._functions.steps(self._kind, feed, len(batches), self._starts)
        limit = 1 if self.num_scheduled < self._warmup_steps else self._dispatcher.max_in_flight
        while self._num_in_flight >= limit:
            self._dispatcher.process_result(wait=True)
        self._num_in_flight += 1
        self._is_written = False
        self.num_scheduled += len(batches)
        self._layout = layout
        on_result = functools.partial(self._add, layout, self.num_scheduled)
        tensors = [tensor for batch in batches for tensor in batch.tensors]
        self._dispatcher.submit(function, tensors, feed.per_worker, on_result)
        while self._dispatcher.process_result(wait=False):
            pass

    def _add(self, layout: Layout, step: int, outputs: list[np.ndarray]) -> None:
        added, others, staleness = layout.split(outputs[0])
        if step > self._last_step:  # logs that are no metric's are those of the last batch, as in one process
            self._last_step, self._logs_of_last_step = step, others
        for total, part in zip(self._totals, added, strict=True):
            total += part
        self._staleness.update(int(each) for each in staleness if each >= 0)
        self._num_in_flight -= 1

    def finish(self) -> None:
        """Waits for all steps in flight."""
        while self._num_in_flight:
            self._dispatcher.process_result(wait=True)

    def finish_early(self) -> None:
        """Waits for the steps in flight, and writes the metrics' variables, unless that is done."""
        if not self._is_written:
            self.finish()
            self.logs(now=True)

    def logs(self, *, now: bool = False) -> dict[str, Any]:
        """Returns the logs of the steps that have finished, under the names that the user's step returns.

        Args:
            now: bool, whether to compute them in any case, and not ten times a second at most.
        """
        if now or time.monotonic() > self._logs_at + _LOGS_INTERVAL:
            self._logs = self._current_logs()
            self._logs_at = time.monotonic()
        return dict(self._logs)

    def _current_logs(self) -> dict[str, Any]:
        for variable, start, total in zip(self._variables, self._starts, self._totals, strict=True):
            variable.assign((start + total).astype(start.dtype))
        self._is_written = not self._num_in_flight
        if self._layout is None:
            return {}
        layout, model = self._layout, self._functions.model
        own = model.get_metrics_result() if is_overridden(model, "get_metrics_result") else {}
        if partial := [name for name in layout.computed_from_results if name not in own]:
            once.warning(
                f"logs: {', '.join(partial)}, computed from metrics' results in a step, of the last batch only. Fix: "
                "compute it in `get_metrics_result` of the model, which the chief calls for all batches"
            )
        read = {name: layout.results[name]() for name in layout.results}
        values = {**dict.fromkeys(layout.order, 0.0), **self._logs_of_last_step, **own, **read}
        return {name: values[name] for name in layout.order}

    def epoch_logs(self) -> dict[str, Any]:
        """Returns the logs of the whole pass, with its staleness."""
        logs = self.logs(now=True)
        if self._staleness:
            logs |= staleness_logs(self._staleness, self._dispatcher.num_workers)
            logger.info(
                "%d updates by their staleness: %s",
                self._staleness.total(),
                ", ".join(f"{each} ({count} times)" for each, count in sorted(self._staleness.items())),
            )
        return logs
