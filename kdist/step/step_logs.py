"""The logs of a step, made equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.metrics import flat_logs, flat_metrics, recorded_results
from kdist.keras_hooks.trainer import is_overridden
from kdist.reports.log import once
from kdist.state.graphs.rank_dependence import computed_of
from kdist.step.step import Step


def measured_logs(run: Callable[[], Any], model: keras.Model, step: Step) -> tuple[Any, dict[str, Callable[[], Any]]]:
    """Runs a step of a model that returns logs.

    Values that are not results of metrics are averaged over the ranks, with a warning if they are computed from
    results. An integer that is computed from rows is that of the global batch; what else is no float stays this rank's,
    with a warning if it depends on the rank's rows. Results are this rank's, until the metrics are summed.

    Collective: every rank must call this, in the same order.

    Returns:
        The logs, and a dict by name of callables that read the metrics' results again.
    """
    with recorded_results(flat_metrics(model)) as recorded:
        logs = flat_logs(run())
    if not isinstance(logs, dict):
        return logs, {}
    results = {name: read for name, value in logs.items() for result, read in recorded if result is value}
    others = {name: tf.convert_to_tensor(logs[name]) for name in sorted(logs) if name not in results}
    warns = step.engine.rank == 0 and step.engine.size > 1
    # `get_metrics_result` is called again when the metrics have been summed, if the logs have its names.
    if warns and not is_overridden(model, "get_metrics_result"):
        of_results = _computed_from([result for result, _ in recorded], others)
    else:
        of_results = []
    if of_results:
        once.warning(
            f"the step returns logs that are computed from the results of metrics: {', '.join(of_results)}. Each is an "
            "average over the ranks of a function of the rank's own result. Fix: compute it in `get_metrics_result`, "
            "which is called when the metrics are summed, or write a metric"
        )
    counts = [name for name, value in others.items() if _is_count(value, step)]
    no_floats = [name for name, value in others.items() if not value.dtype.is_floating and name not in counts]
    own = [name for name in no_floats if step.may_differ(logs[name])]
    if own and warns:
        once.warning(
            f"the step returns logs that depend on a rank's rows, and are no floats: {', '.join(own)}. Each rank shows "
            'its own, as kdist does not know whether they count something. Fix: return `kdist.all_reduce(value, "sum")`'
            ", or the result of a metric"
        )
    dtypes = {name: value.dtype for name, value in others.items()}
    others = {
        name: step.custom_losses.as_mean(tf.cast(value, tf.float64), f"The log {name!r} of the step")
        if name in counts
        else (step.custom_losses.as_mean(value, f"The log {name!r} of the step") if _is_whole(value, step) else value)
        for name, value in others.items()
        if value.dtype.is_floating or name in counts
    }
    means = dict(zip(others, step.mean_over_ranks(list(others.values())) if others else [], strict=True))
    return {**logs, **means, **{name: tf.cast(tf.round(means[name]), dtypes[name]) for name in counts}}, results


def _is_count(value: tf.Tensor, step: Step) -> bool:
    """Returns whether a log is an integer that is computed from rows, of which the graph shows what it is of them."""
    is_integer = bool(value.dtype.is_integer) and _is_whole(value, step)
    return is_integer and tf.is_symbolic_tensor(value) and step.engine.size > 1 and step.depends_on_rows(value)


def _is_whole(value: tf.Tensor, step: Step) -> bool:
    """Returns whether a log holds no rows: a number, or of a fixed shape where the graph does not know their number."""
    if value.shape.rank == 0:
        return True
    found = step.own_rows.of(value) if value.shape.is_fully_defined() and tf.is_symbolic_tensor(value) else None
    return found is not None and found.length is None


def _computed_from(sources: Sequence[Any], values: Mapping[str, tf.Tensor]) -> list[str]:
    """Returns the names of those values of a graph that are computed from one of the sources."""
    if tf.executing_eagerly():
        return []
    found = {source.name for source in sources if tf.is_symbolic_tensor(source)}
    return [
        name
        for name, value in values.items()
        if tf.is_symbolic_tensor(value) and any(each.name in found for each in computed_of([value]))
    ]
