"""One step of `fit` or `evaluate` as a worker makes it: metrics of its own, and a staleness that is known."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.strategies.options import ParameterServer
from kdist.training.fused_sgd import fused_sgd
from kdist.training.logs import flat_logs, results_noted
from kdist.training.metrics import flat_metrics
from kdist.training.optimizers import innermost, optimizers_of


@dataclasses.dataclass
class Layout:
    """What is where in the vector that an execution of some steps returns.

    All numbers travel as one `float64` vector: what the steps added to the metrics' states, what else the last step
    returned, and the staleness of each step's update (-1 for none).

    Attributes:
        shapes: list of tuple of int, the shapes of the metrics' variables.
        others: list of str, the names of what a step returned that is no metric's result.
        results: dictionary from a log's name to a callable that reads a metric's result.
        order: list of str, the names of all that a step returned.
    """

    shapes: list[tuple[int, ...]]
    others: list[str] = dataclasses.field(default_factory=list)
    results: dict[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    order: list[str] = dataclasses.field(default_factory=list)

    def split(self, vector: np.ndarray) -> tuple[list[np.ndarray], dict[str, float], np.ndarray]:
        """Returns what the steps added to each variable, the other logs, and the staleness of each update."""
        added, at = [], 0
        for shape in self.shapes:
            size = int(np.prod(shape))
            added.append(vector[at : at + size].reshape(shape))
            at += size
        others = dict(zip(self.others, vector[at : at + len(self.others)].tolist(), strict=True))
        return added, others, vector[at + len(self.others) :]


class ScheduledStep:
    """Traces a model's training or test step as a worker makes it.

    Args:
        model: `keras.Model`, built.
        name: str, `"train_step"` or `"test_step"`.
        strategy: the strategy.
        options: `ParameterServer`, what becomes of stale updates.
        starts: sequence of arrays, the states of the model's metrics when they are reset.
    """

    def __init__(
        self,
        model: keras.Model,
        name: str,
        strategy: tf.distribute.Strategy,
        options: ParameterServer,
        starts: Sequence[np.ndarray],
    ) -> None:
        self._model = model
        self._name = name
        self._strategy = strategy
        self._options = options
        self._starts = starts
        self.layout = Layout([tuple(start.shape) for start in starts])
        self._one_step = tf.function(self._run, reduce_retracing=True, autograph=False)

    def vector(self, batches: Sequence[Any]) -> tf.Tensor:
        """Makes a step with each batch, one after the other, and returns what the chief is to know.

        Args:
            batches: sequence of structures of tensors, as the model's step takes them.
        """
        steps = [self._one_step(data) for data in batches]
        added = [tf.add_n([step[0] for step in steps])]
        return tf.concat([*added, steps[-1][1], *(step[2] for step in steps)], 0)

    def _run(self, data: Any) -> Any:
        return self._strategy.run(self._measured, args=(data,))

    def _measured(self, data: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        model = self._model
        variables = model.metrics_variables
        metrics = flat_metrics(model)
        optimizers = optimizers_of(model) if self._name == "train_step" else []
        with _own_state(variables, self._starts) as states, results_noted(metrics) as noted:
            with contextlib.ExitStack() as stack:
                for each in optimizers:
                    stack.enter_context(fused_sgd(innermost(each)))
                updates = [stack.enter_context(_measured_update(each, self._options)) for each in optimizers]
                # What is read of the model is read after its version.
                stack.enter_context(tf.control_dependencies([update.version for update in updates]))
                logs = flat_logs(getattr(model, self._name)(data))
            layout = self.layout
            if isinstance(logs, dict):
                layout.order = list(logs)
                layout.results = {key: read for key, value in logs.items() for seen, read in noted if seen is value}
                layout.others = [key for key in logs if key not in layout.results]
            added = [
                tf.reshape(_number(states(variable)) - _number(tf.constant(start)), [-1])
                for variable, start in zip(variables, self._starts, strict=True)
            ]
            others = [tf.reshape(_number(logs[key]), []) for key in layout.others] if isinstance(logs, dict) else []
        nothing = tf.zeros([0], tf.float64)
        staleness = [tf.reshape(tf.cast(update.staleness, tf.float64), [1]) for update in updates[:1]]
        return (
            tf.concat([nothing, *added], 0),
            tf.stack(others) if others else nothing,
            tf.concat([nothing, *staleness], 0),
        )


def _number(value: Any) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(value), tf.float64)


@contextlib.contextmanager
def _own_state(
    variables: Sequence[keras.Variable], starts: Sequence[np.ndarray]
) -> Iterator[Callable[[keras.Variable], tf.Tensor]]:
    """Makes variables tensors of the step's own while it is traced: it begins with `starts`, and nobody else adds.

    Gives a function that returns a variable's tensor as it is now.
    """
    kept = [variable._value for variable in variables]

    def assign(variable: keras.Variable, value: Any) -> None:
        variable._value = tf.cast(value, variable.dtype)

    for variable, start in zip(variables, starts, strict=True):
        variable._value = tf.constant(start)
        variable.__dict__["_direct_assign"] = lambda value, variable=variable: assign(variable, value)
    try:
        yield lambda variable: variable._value
    finally:
        for variable, value in zip(variables, kept, strict=True):
            del variable.__dict__["_direct_assign"]
            variable._value = value


class _Update:
    """The update of one optimizer in one step.

    Attributes:
        version: int64 scalar tensor, the updates that the weights had seen before the step read them.
        staleness: int64 scalar tensor, the updates since then, when the gradient was applied; -1 before.
    """

    def __init__(self, version: tf.Tensor) -> None:
        self.version = version
        self.staleness = tf.constant(-1, tf.int64)


@contextlib.contextmanager
def _measured_update(optimizer: keras.optimizers.Optimizer, options: ParameterServer) -> Iterator[_Update]:
    """Counts updates without losing one, measures their staleness, and does with it what the options say."""
    inner = innermost(optimizer)
    updating = [inner, *getattr(inner, "optimizers", ())]  # those of a `MultiOptimizer`
    # Keras reads, adds and writes: two workers at once would count one. The ps adds by itself.
    counters = list({id(each._iterations): each._iterations for each in (*updating, optimizer)}.values())
    counted = inner._iterations.value
    update = _Update(tf.cast(tf.convert_to_tensor(counted), tf.int64))
    apply = optimizer.apply

    def measured(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        # The gradients come first: the time in which others update is that of computing them.
        with tf.control_dependencies([each for each in grads if each is not None]):
            update.staleness = tf.cast(tf.convert_to_tensor(counted.read_value()), tf.int64) - update.version
        if options.staleness != "drop":
            return apply(grads, trainable_variables)
        fresh = update.staleness <= options.bound

        def applied() -> tf.Tensor:
            apply(grads, trainable_variables)
            return tf.constant(True)

        return tf.cond(fresh, applied, lambda: tf.constant(False))

    def scaled(rate: Callable[[], Any]) -> Any:
        value = tf.convert_to_tensor(rate())
        return value / tf.cast(tf.maximum(update.staleness, 1), value.dtype)

    for counter in counters:
        counter.__dict__["assign_add"] = lambda value, counter=counter: counter._value.assign_add(
            tf.cast(value, counter.dtype), read_value=False
        )
    optimizer.__dict__["apply"] = measured
    if options.staleness == "scale":
        for each in updating:
            each.__dict__["_get_current_learning_rate"] = functools.partial(scaled, each._get_current_learning_rate)
    try:
        yield update
    finally:
        del optimizer.__dict__["apply"]
        for each in updating:
            each.__dict__.pop("_get_current_learning_rate", None)
        for counter in counters:
            del counter.__dict__["assign_add"]
