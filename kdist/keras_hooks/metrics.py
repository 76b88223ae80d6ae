"""Keras' metrics: nested ones, those whose states add up, and their results in logs."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileMetrics, MetricsList

from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.trainer import is_output_loss, loss_tracker

_BUILT_FOR = "kdist_built_for"

_KERAS_METRICS, _KERAS_LOSSES = "keras.src.metrics.", "keras.src.losses."
# Functions of Keras whose value is not one per row; hinges ask whether all targets are 0 or 1.
_OF_WHOLE_BATCHES = ("circle", "dice", "hinge", "squared_hinge", "tversky")

# Of predictions of one dimension, whose last axis is the rows, their value is no mean over the rows.
_NO_MEAN_OF_ONE_DIMENSION = ("concordance_correlation", "cosine_similarity", "kl_divergence", "pearson_correlation")


def flat_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the metrics of a model, nested ones too."""
    return _flat(model.metrics)


def joint_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the metrics whose states are not known to add up over the rows, without those nested in them.

    Known are Keras' own classes, if they have no function of the user's and take no statistics over the rows.
    """
    return [metric for metric in _flat(model.metrics, _adds_up) if not _adds_up(metric)]


def is_among_weighted(metric: Any, model: keras.Model, *, joint: bool) -> bool:
    """Returns whether what a metric is given by a model's step is weighted by the ranks' shares.

    Args:
        metric: `keras.metrics.Metric`, of any model.
        model: `keras.Model`.
        joint: bool, whether `joint_metrics` and what is nested in them count the global batch, without a weight.
    """
    counted = _flat(model.metrics, _adds_up) if joint else flat_metrics(model)
    return any(metric is each for each in counted) and (not joint or _adds_up(metric))


def resets_by_assignments(metric: keras.metrics.Metric) -> bool:
    """Returns whether `reset_state` of a metric is Keras' own, which only assigns to variables."""
    return "reset_state" not in vars(metric) and type(metric).reset_state.__module__.startswith("keras.src.")


def summed_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of a model's metrics without those of `joint_metrics`."""
    joint = {id(variable) for metric in joint_metrics(model) for variable in metric.variables}
    return [variable for variable in model.metrics_variables if id(variable) not in joint]


def _flat(
    metrics: Sequence[keras.metrics.Metric], descends: Callable[[keras.metrics.Metric], bool] = lambda _: True
) -> list[keras.metrics.Metric]:
    flat: list[keras.metrics.Metric] = []
    pending = list(metrics)
    while pending:
        metric = pending.pop(0)
        flat.append(metric)
        if descends(metric):
            pending += [*getattr(metric, "metrics", []), *getattr(metric, "_metrics", [])]
    return flat


def _adds_up(metric: keras.metrics.Metric) -> bool:
    if isinstance(metric, (CompileMetrics, MetricsList)):
        return True  # they have no states of their own
    is_overridden = not isinstance(vars(metric).get("update_state", _UpdateOfSums()), _UpdateOfSums)
    if not type(metric).__module__.startswith(_KERAS_METRICS) or is_overridden:
        return False
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return True
    function = getattr(metric, "_fn", None)
    is_mean = getattr(function, "__name__", "") not in _NO_MEAN_OF_ONE_DIMENSION
    return is_mean and is_per_row(function, getattr(metric, "_fn_kwargs", {}))


class _UpdateOfSums:
    """The `update_state` of a metric whose states add up, in a step; see `wrapped_updates`."""

    def __init__(self, call: Callable[..., Any] = lambda: None) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


@contextlib.contextmanager
def wrapped_updates(
    model: keras.Model,
    call: Callable[..., Any],
    call_sums: Callable[..., Any] | None = None,
    call_rows: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Replaces `update_state` of a model's metrics while the context is open.

    Args:
        model: `keras.Model`.
        call: callable that takes what a metric is, its `update_state`, and the arguments for that; for `joint_metrics`.
        call_sums: the same for those metrics whose states add up over the rows; by default these stay as they are.
        call_rows: the same for those `joint_metrics` that Keras' own step updates, with rows; other metrics that it
            updates stay as they are. `None` for a step of the user's, which may pass anything to them.
    """
    with contextlib.ExitStack() as stack:
        seen: list[keras.metrics.Metric] = []

        def wrap() -> None:
            joint, given_rows = joint_metrics(model), [] if call_rows is None else _updated_by_keras(model)
            for metric in _flat(model.metrics, _adds_up):
                if any(metric is each for each in seen) or isinstance(metric, (CompileMetrics, MetricsList)):
                    continue
                is_joint = any(metric is each for each in joint)
                by: Callable[..., Any] | None = call if is_joint else call_sums
                if any(metric is each for each in given_rows):
                    by = call_rows if is_joint else None
                if by is None:
                    continue
                seen.append(metric)
                update = functools.partial(by, f"The metric {metric.name!r}", metric.update_state)
                stack.enter_context(patched(metric, "update_state", update if is_joint else _UpdateOfSums(update)))

        def building(build: Callable[..., None]) -> Callable[..., None]:
            def build_and_wrap(*args: Any, **kwargs: Any) -> None:
                build(*args, **kwargs)
                wrap()

            return build_and_wrap

        wrap()
        for metric in model.metrics:
            if isinstance(metric, CompileMetrics):  # the first step may build it
                stack.enter_context(patched(metric, "build", building(metric.build)))
                if call_rows is None:
                    stack.enter_context(patched(metric, "update_state", _rebuilding(metric)))
        yield


def _updated_by_keras(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the metrics that Keras' own steps update, nested ones too: others are updated in layers."""
    found = [each for each in model.metrics if isinstance(each, CompileMetrics) or is_output_loss(model, each)]
    return [*filter(None, [loss_tracker(model)]), *_flat(found)]


@contextlib.contextmanager
def build_shapes_recorded(model: keras.Model) -> Iterator[None]:
    """Records the shapes of targets and predictions for which a model's compiled metrics are built in the context.

    A step of the user's own may pass other shapes to them, for which Keras takes another metric as `"accuracy"`; see
    `wrapped_updates`.
    """
    compiled = model._compile_metrics
    if compiled is None:
        yield
        return
    build = compiled.build

    def recording(y_true: Any, y_pred: Any) -> None:
        vars(compiled)[_BUILT_FOR] = _forms(y_true, y_pred)
        build(y_true, y_pred)

    with patched(compiled, "build", recording):
        yield


def _rebuilding(compiled: CompileMetrics) -> Callable[..., Any]:
    """Returns an `update_state` that builds compiled metrics again for targets and predictions of other forms."""
    update = compiled.update_state

    def update_state(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        built_for, given = vars(compiled).pop(_BUILT_FOR, None), _forms(y_true, y_pred)
        if built_for not in (None, given) and all(rank is not None for rank, _ in given):
            compiled.built = False
        return update(y_true, y_pred, sample_weight=sample_weight)

    return update_state


def _forms(*values: Any) -> list[Any]:
    """Returns what Keras looks at to take a metric for `"accuracy"`: the number of axes, and whether the last is 1."""
    shapes = [tf.TensorShape(getattr(leaf, "shape", ())) for value in values for leaf in keras.tree.flatten(value)]
    return [(shape.rank, bool(shape.rank) and shape[-1] == 1) for shape in shapes]


def is_per_row(function: Any, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a function of targets and predictions is Keras' own and has a value for each row.

    Args:
        function: callable.
        arguments: mapping, the further arguments of its calls, by name.
    """
    return (
        inspect.isfunction(function)
        and function.__module__.startswith((_KERAS_METRICS, _KERAS_LOSSES))
        and function.__name__ not in _OF_WHOLE_BATCHES
        and arguments.get("axis", -1) == -1
    )


@contextlib.contextmanager
def recorded_results(metrics: Sequence[keras.metrics.Metric]) -> Iterator[list[tuple[Any, Callable[[], Any]]]]:
    """Records each tensor that a metric returns as its result, with a function that reads it again."""
    recorded: list[tuple[Any, Callable[[], Any]]] = []

    def recording(result: Callable[[], Any]) -> Callable[[], Any]:
        def read(place: int) -> Any:
            leaf = keras.tree.flatten(result())[place]
            return tf.identity(leaf) if tf.is_tensor(leaf) else leaf  # of a variable its value now

        def recorded_result() -> Any:
            value = result()
            for place, leaf in enumerate(keras.tree.flatten(value)):
                recorded.append((leaf, functools.partial(read, place)))
            return value

        return recorded_result

    with contextlib.ExitStack() as stack:
        for metric in metrics:
            stack.enter_context(patched(metric, "result", recording(metric.result)))
        yield recorded


def flat_logs(logs: Any) -> Any:
    """Returns logs without nested dictionaries, as Keras' callbacks get them.

    `{m.name: m.result() for m in self.metrics}` is nested: the compiled metrics are one metric of several results.
    """
    if not isinstance(logs, dict):
        return logs
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat.update(flat_logs(value) if isinstance(value, dict) else {name: value})
    return flat
