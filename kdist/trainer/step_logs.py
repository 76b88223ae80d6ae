"""The logs of a step, made equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.metrics import flat_logs, recorded_results
from kdist.reports.log import once
from kdist.step.step import Step


def measured_logs(
    run: Callable[[], Any], metrics: Sequence[keras.metrics.Metric], step: Step
) -> tuple[Any, dict[str, Callable[[], Any]]]:
    """Runs a step that returns logs.

    Values that are not results of metrics are averaged over the ranks; what is no float stays this rank's, with a
    warning if it depends on the rank's rows. Results are this rank's, until the metrics are summed.

    Returns:
        The logs, and a dict by name of callables that read the metrics' results again.
    """
    with recorded_results(metrics) as recorded:
        logs = flat_logs(run())
    if not isinstance(logs, dict):
        return logs, {}
    results = {name: read for name, value in logs.items() for result, read in recorded if result is value}
    others = {name: tf.convert_to_tensor(logs[name]) for name in sorted(logs) if name not in results}
    no_floats = [name for name, value in others.items() if not value.dtype.is_floating]
    own = [name for name in no_floats if step.may_differ(logs[name])]
    if own and step.is_chief and step.engine.size > 1:
        once.warning(
            f"the step returns logs that depend on a rank's rows, and are no floats: {', '.join(own)}. Each rank shows "
            'its own, as kdist does not know whether they count something. Fix: return `kdist.all_reduce(value, "sum")`'
            ", or the result of a metric"
        )
    others = {name: value for name, value in others.items() if value.dtype.is_floating}
    means = step.mean_over_ranks(list(others.values())) if others else []
    return {**logs, **dict(zip(others, means, strict=True))}, results
