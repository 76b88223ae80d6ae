"""The staleness of updates: how many others were applied since the weights were read, and what follows from it."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.optimizers import CURRENT_RATE, innermost, iterations
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.variables import value_of
from kdist.step.update import Stage, Update
from kdist.strategies.options import ParameterServer


class MeasureStaleness(Stage):
    """Measures the staleness of updates, and makes the ps count them, so that none is lost.

    Attributes:
        versions: dictionary of int64 scalar tensors by optimizer (its `id`): the updates of the weights before the step
            reads them.
        staleness: dictionary of int64 scalar tensors by optimizer: the updates since then; -1 without an update.
    """

    phase = "inspect local"

    def __init__(self) -> None:
        self.versions: dict[int, tf.Tensor] = {}
        self.staleness: dict[int, tf.Tensor] = {}

    @contextlib.contextmanager
    def opened(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        """Reads the version of an optimizer's weights, and lets the ps count its updates."""
        self.versions[id(optimizer)] = tf.cast(tf.convert_to_tensor(_counter(optimizer)), tf.int64)
        self.staleness[id(optimizer)] = tf.constant(-1, tf.int64)
        # Keras reads, adds and writes: of two workers at once only one would count. The ps adds by itself.
        counters = {id(each): each for each in map(iterations, (*_parts(optimizer), optimizer))}
        with contextlib.ExitStack() as stack:
            for counter in counters.values():
                stack.enter_context(patched(counter, "assign_add", functools.partial(_add_on_ps, counter)))
            yield

    def __call__(self, update: Update, proceed: Callable[[], Any]) -> Any:
        """Measures when the gradients are computed: updates that are applied meanwhile make this one stale."""
        with tf.control_dependencies([each for each in update.gradients if each is not None]):
            now = tf.cast(tf.convert_to_tensor(_counter(update.optimizer).read_value()), tf.int64)
        self.staleness[id(update.optimizer)] = now - self.versions[id(update.optimizer)]
        return proceed()


class _DropStaleUpdates(Stage):
    """Drops updates whose staleness is above a bound (bounded staleness)."""

    phase = "reduce"

    def __init__(self, measured: MeasureStaleness, bound: int) -> None:
        self._measured = measured
        self._bound = bound

    def __call__(self, update: Update, proceed: Callable[[], Any]) -> Any:
        """Applies the update, or not."""

        def applied() -> tf.Tensor:
            proceed()
            return tf.constant(True)

        is_fresh = self._measured.staleness[id(update.optimizer)] <= self._bound
        return tf.cond(is_fresh, applied, lambda: tf.constant(False))


class _ScaleStaleUpdates(Stage):
    """Divides the learning rate of each update by its staleness."""

    phase = "scale rate"

    def __init__(self, measured: MeasureStaleness) -> None:
        self._measured = measured

    def __call__(self, update: Update, proceed: Callable[[], Any]) -> Any:
        """Runs the update with the divided rate."""
        staleness = self._measured.staleness[id(update.optimizer)]

        def scaled(rate: Callable[[], Any]) -> Any:
            value = tf.convert_to_tensor(rate())
            return value / tf.cast(tf.maximum(staleness, 1), value.dtype)

        with contextlib.ExitStack() as stack:
            for each in _parts(update.optimizer):
                rate = getattr(each, CURRENT_RATE)
                stack.enter_context(patched(each, CURRENT_RATE, functools.partial(scaled, rate)))
            return proceed()


def stages_for_stale_updates(measured: MeasureStaleness, options: ParameterServer) -> list[Stage]:
    """Returns the stages that treat stale updates as the user's options ask."""
    if options.staleness == "drop":
        return [_DropStaleUpdates(measured, int(options.bound or 0))]
    return [_ScaleStaleUpdates(measured)] if options.staleness == "scale" else []


def _parts(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns the innermost optimizer, and those of a `MultiOptimizer`."""
    inner = innermost(optimizer)
    return [inner, *getattr(inner, "optimizers", ())]


def _counter(optimizer: keras.optimizers.Optimizer) -> tf.Variable:
    return iterations(innermost(optimizer)).value


def _add_on_ps(counter: keras.Variable, value: Any) -> Any:
    return value_of(counter).assign_add(tf.cast(value, counter.dtype), read_value=False)


def staleness_logs(counts: Mapping[int, int], num_workers: int) -> dict[str, float]:
    """Returns the staleness of an epoch's updates as logs.

    Callbacks want the same names in each epoch, and a number for each, so the number of workers determines the bins.

    Args:
        counts: mapping of staleness to the number of updates that had it; at least one.
        num_workers: int. The updates of N workers that run in step have a staleness of N - 1.

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
