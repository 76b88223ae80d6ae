"""What a step of the user's own returns, made the same on all ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.training.step import Step


def measured_logs(
    run: Callable[[], Any], metrics: Sequence[keras.metrics.Metric], step: Step
) -> tuple[Any, dict[str, Callable[[], Any]]]:
    """Runs a step that returns logs.

    What is no metric's result is averaged over the ranks, by rows; the results are this rank's own running values,
    until the metrics are added.

    Args:
        run: callable without arguments, the step.
        metrics: the model's metrics, those inside of others included.
        step: `Step`, open.

    Returns:
        The logs, and for each name that holds a metric's result a callable that reads it again.
    """
    with results_noted(metrics) as noted:
        logs = flat_logs(run())
    if not isinstance(logs, dict):
        return logs, {}
    results = {name: read for name, value in logs.items() for result, read in noted if result is value}
    others = {name: value for name, value in logs.items() if name not in results}
    return {**logs, **mean_logs(others, step)}, results


@contextlib.contextmanager
def results_noted(metrics: Sequence[keras.metrics.Metric]) -> Iterator[list[tuple[Any, Callable[[], Any]]]]:
    """Notes each tensor that a metric gives as its result, with how to read it again."""
    noted: list[tuple[Any, Callable[[], Any]]] = []

    def noting(result: Callable[[], Any]) -> Callable[[], Any]:
        def read(place: int) -> Any:
            return keras.tree.flatten(result())[place]

        def noted_result() -> Any:
            value = result()
            for place, leaf in enumerate(keras.tree.flatten(value)):
                noted.append((leaf, functools.partial(read, place)))
            return value

        return noted_result

    for metric in metrics:
        metric.__dict__["result"] = noting(metric.result)
    try:
        yield noted
    finally:
        for metric in metrics:
            metric.__dict__.pop("result", None)


def flat_logs(logs: Any) -> Any:
    """Returns logs without dictionaries in them, as Keras hands them to callbacks.

    `{m.name: m.result() for m in self.metrics}` has one: the compiled metrics are one metric of several results.
    """
    if not isinstance(logs, dict):
        return logs
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat.update(flat_logs(value) if isinstance(value, dict) else {name: value})
    return flat


def mean_logs(logs: dict[str, Any], step: Step) -> dict[str, Any]:
    """Averages numbers of a user's own step over the ranks, by rows, so that epoch logs are the same on all."""
    tensors = {key: tf.convert_to_tensor(value) for key, value in sorted(logs.items())}
    means = {key: value for key, value in tensors.items() if value.dtype.is_floating}
    if means:
        means = dict(zip(means, step.mean_over_ranks(list(means.values())), strict=True))
    return {**logs, **means}
