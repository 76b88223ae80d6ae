"""The logs of a step, made equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.metrics import flat_logs, recorded_results
from kdist.step.step import Step


def measured_logs(
    run: Callable[[], Any], metrics: Sequence[keras.metrics.Metric], step: Step
) -> tuple[Any, dict[str, Callable[[], Any]]]:
    """Runs a step that returns logs.

    Values that are not results of metrics are averaged over the ranks. Results are this rank's, until the metrics are
    summed.

    Returns:
        The logs, and a dict by name of callables that read the metrics' results again.
    """
    with recorded_results(metrics) as recorded:
        logs = flat_logs(run())
    if not isinstance(logs, dict):
        return logs, {}
    results = {name: read for name, value in logs.items() for result, read in recorded if result is value}
    others = {name: tf.convert_to_tensor(logs[name]) for name in sorted(logs) if name not in results}
    others = {name: value for name, value in others.items() if value.dtype.is_floating}
    means = step.mean_over_ranks(list(others.values())) if others else []
    return {**logs, **dict(zip(others, means, strict=True))}, results
