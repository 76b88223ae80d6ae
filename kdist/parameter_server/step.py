"""One step of `fit` or `evaluate` as a worker makes it: with metric states of its own, which the chief sums."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.keras_hooks.custom_steps import step_of
from kdist.keras_hooks.metrics import flat_logs, flat_metrics, recorded_results
from kdist.keras_hooks.optimizers import built_outside_of_graphs, optimizers_of
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.variables import DIRECT_ASSIGN, VALUE, value_of
from kdist.parameter_server.staleness import MeasureStaleness, stages_for_stale_updates
from kdist.state.graphs.rank_dependence import computed_of, tensor_key
from kdist.step.fused_sgd import FusedSGD
from kdist.step.update import UpdatePipeline
from kdist.strategies.options import ParameterServer


@dataclasses.dataclass
class Layout:
    """The layout of the vector that an execution of some steps returns.

    All numbers travel as one `float64` vector: what the steps added to the metrics' states, what else the last step
    returned, and the staleness of each step's update (-1 for none).

    Attributes:
        shapes: list of tuple of int, the shapes of the metrics' variables.
        others: list of str, the names of what a step returned that is no metric's result.
        computed_from_results: list of str, those of `others` that the step computes from metrics' results.
        results: dictionary from a log's name to a callable that reads a metric's result.
        order: list of str, the names of all that a step returned.
    """

    shapes: list[tuple[int, ...]]
    others: list[str] = dataclasses.field(default_factory=list)
    computed_from_results: list[str] = dataclasses.field(default_factory=list)
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


class WorkerStep:
    """Traces a model's training or test step as a worker makes it.

    Args:
        model: `keras.Model`, built.
        kind: str, `"train"` or `"test"`.
        strategy: the strategy.
        options: `ParameterServer`, how stale updates are treated.
        starts: sequence of arrays, the states of the model's metrics when they are reset.
    """

    def __init__(
        self,
        model: keras.Model,
        kind: str,
        strategy: tf.distribute.Strategy,
        options: ParameterServer,
        starts: Sequence[np.ndarray],
    ) -> None:
        self._model = model
        self._kind = kind
        self._strategy = strategy
        self._options = options
        self._starts = starts
        self.layout = Layout([tuple(start.shape) for start in starts])
        self._one_step = tf.function(self._run, reduce_retracing=True, autograph=False)

    def vector(self, batches: Sequence[Any]) -> tf.Tensor:
        """Makes a step with each batch, one after the other, and returns the vector for the chief.

        Args:
            batches: sequence of structures of tensors, as the model's step takes them.
        """
        steps = [self._one_step(data) for data in batches]
        added = [tf.add_n([step[0] for step in steps])]
        return tf.concat([*added, steps[-1][1], *(step[2] for step in steps)], 0)

    def _run(self, data: Any) -> Any:
        return self._strategy.run(self._replica_step, args=(data,))

    def _replica_step(self, data: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        model, layout = self._model, self.layout
        variables = model.metrics_variables
        is_training = self._kind == "train"
        optimizers = optimizers_of(model) if is_training else []
        measured = MeasureStaleness()
        pipeline = UpdatePipeline([measured, *stages_for_stale_updates(measured, self._options), FusedSGD()])
        with _local_states(variables, self._starts), recorded_results(flat_metrics(model)) as noted:
            # Weights are read after their version.
            with (
                built_outside_of_graphs(optimizers),
                pipeline.opened(optimizers),
                tf.control_dependencies(list(measured.versions.values())),
            ):
                logs = flat_logs(step_of(model, "train_step" if is_training else "test_step")(data))
            if not isinstance(logs, dict):
                logs = {}
            layout.order = list(logs)
            layout.results = {key: read for key, value in logs.items() for seen, read in noted if seen is value}
            layout.others = [key for key in logs if key not in layout.results]
            read = {tensor_key(seen) for seen, _ in noted}
            layout.computed_from_results = [
                key for key in layout.others if any(tensor_key(each) in read for each in computed_of([logs[key]]))
            ]
            pairs = zip(variables, self._starts, strict=True)
            added = [_vector(value_of(variable)) - _vector(start) for variable, start in pairs]
        empty = tf.zeros([0], tf.float64)
        return (
            tf.concat([empty, *added], 0),
            tf.concat([empty, *(tf.reshape(_vector(logs[key]), [1]) for key in layout.others)], 0),
            tf.concat([empty, *map(_vector, list(measured.staleness.values())[:1])], 0),
        )


def _vector(value: Any) -> tf.Tensor:
    return tf.reshape(tf.cast(tf.convert_to_tensor(value), tf.float64), [-1])


@contextlib.contextmanager
def _local_states(variables: Sequence[keras.Variable], starts: Sequence[np.ndarray]) -> Iterator[None]:
    """Makes variables tensors of the step while it is traced, which begin with `starts` and which no worker shares."""

    def assign(variable: keras.Variable, value: Any) -> None:
        vars(variable)[VALUE] = tf.cast(value, variable.dtype)

    with contextlib.ExitStack() as stack:
        for variable, start in zip(variables, starts, strict=True):
            stack.enter_context(patched(variable, VALUE, tf.constant(start)))
            stack.enter_context(patched(variable, DIRECT_ASSIGN, functools.partial(assign, variable)))
        yield
