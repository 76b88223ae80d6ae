"""What a step of the user's own returns, made the same on all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kdist.training.step import Step


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


def mean_logs(logs: Any, step: Step) -> Any:
    """Averages what a user's own step returns over the ranks, by rows, so that epoch logs are the same on all."""
    if not isinstance(logs, dict):
        return logs
    tensors = {key: tf.convert_to_tensor(value) for key, value in sorted(logs.items())}
    means = {key: value for key, value in tensors.items() if value.dtype.is_floating}
    if means:
        means = dict(zip(means, step.mean_over_ranks(list(means.values())), strict=True))
    return {**logs, **means}
