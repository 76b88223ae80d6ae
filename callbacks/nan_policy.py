"""A policy for losses and gradients that are not finite, the same on all ranks."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from kdist.callbacks.engine_callback import EngineCallback
from kdist.engines.engine import Engine
from kdist.errors import NotFiniteError, StrategyError
from kdist.keras_hooks.optimizers import innermost, is_learning_rate, iterations, optimizers_of
from kdist.keras_hooks.patching import patched
from kdist.state.session import session_of
from kdist.state.variables import ModelState
from kdist.step.extensions import step_extensions
from kdist.step.update import Stage, Update

logger = logging.getLogger("kdist")

ACTIONS = ("raise", "skip")


class NaNPolicy(EngineCallback):
    """Ends the training, or skips the step, when a loss or a gradient is NaN or infinite.

    All ranks do the same in the same step. The message names the step, the ranks, and their loss or the variables whose
    gradients are not finite. In `kdist.scope()` the summed gradients are checked, without another message; a loss that
    is not finite with finite gradients is found at the end of the epoch. Without the scope, each step sends a message.

    With `"skip"`, weights, statistics, optimizer, random state and metrics are restored after such a step, which takes
    a copy of them in each step, and `skipped_steps` is in the epoch's logs. Gradients of a `LossScaleOptimizer`, which
    handles overflow, are not checked.

    Collective: every rank must call this, in the same order.

    Args:
        action: `"raise"` or `"skip"`.
        engine: `Engine` or `None`, how the ranks communicate: by default the engine of the model's scope.

    Raises:
        NotFiniteError: on all ranks, after the step, if `action="raise"`; the weights are not usable then.
        ScopeError: when the model is set, if there are several ranks and no engine; when training begins, if the model
            trains on several devices of this process, with parameter servers, or without whole gradients in each step.
        StrategyError: if `action` is unknown.

    Example:
    ```python
    model.fit(x, y, callbacks=[kdist.callbacks.NaNPolicy("skip")])
    ```
    """

    def __init__(self, action: Literal["raise", "skip"] = "raise", engine: Engine | None = None) -> None:
        if action not in ACTIONS:
            raise StrategyError(
                f"The action of NaNPolicy is unknown. Received: action={action!r}. Expected one of "
                f"{', '.join(map(repr, ACTIONS))}. Fix: change the argument."
            )
        super().__init__(engine)
        self.action = action
        self.found: list[list[Any]] = []
        self._num_skipped = 0
        self._data: list[tf.Tensor] = []
        self._losses: list[tf.Tensor] = []
        self._has_found: Any = None  # made when training begins: TensorFlow may not be used before a scope

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Adds the checks to the model's step."""
        session_of(self.model).check_step_extension(type(self).__name__, joint=True)
        self.found = []
        self._has_found = tf.Variable(False, trainable=False, name="kdist_step_is_not_finite")  # a step may branch
        step_extensions(self.model).add(self, around=self._around_step, stages=[_InspectReduced(self)])

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Removes the checks."""
        step_extensions(self.model).remove(self)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Resets the count."""
        self._num_skipped = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs or raises what was found in the step."""
        found, self.found = self.found, []
        for step in found:  # the same steps on all ranks
            self._num_skipped += 1
            skipped = "; the step is skipped on all ranks" * (self.action == "skip")
            self._report(_message(step[0], self.engine.gather_objects(step)) + skipped)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the number of skipped steps to the logs, and checks the epoch's loss."""
        if logs is None:
            return
        loss = logs.get("loss", 0.0)
        if session_of(self.model).has_global_logs and not math.isfinite(loss):
            self._report(
                f"The loss is not finite. Received: the loss of epoch {epoch} is {loss}, with finite gradients"
            )
        if self.action == "skip":
            logs["skipped_steps"] = self._num_skipped

    def _report(self, message: str) -> None:
        if self.action == "raise":
            step_extensions(self.model).remove(self)  # `on_train_end` is not called after an error
            raise NotFiniteError(
                f"{message}. Expected finite losses and gradients. Fix: check these rows and the learning rate, or "
                'skip such steps with NaNPolicy("skip").'
            )
        if self.engine.rank == 0:
            logger.warning("%s.", message)

    # In the step.

    def _around_step(self, step: Callable[[Any], Any], data: Any) -> Any:
        leaves = tf.nest.flatten(data, expand_composites=True)
        self._data = [leaf for leaf in leaves if tf.is_tensor(leaf) and leaf.dtype.is_floating]
        self._losses = []
        self._has_found.assign(False)
        variables = self._state_variables() if self.action == "skip" else []
        before = [tf.identity(variable) for variable in variables]
        with patched(self.model, "compute_loss", self._recording(self.model.compute_loss)):
            logs = step(data)
        if not variables:
            return logs

        def undo() -> Any:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            return self._results_like(logs)

        return tf.cond(self._has_found, undo, lambda: logs)

    def _state_variables(self) -> list[tf.Variable]:
        """Returns the variables that a step writes, without learning rates, on which ranks have agreed in the step."""
        optimizers = optimizers_of(self.model)
        variables = [*ModelState(self.model).numeric(), *self.model.metrics_variables]
        return [variable.value for variable in variables if not is_learning_rate(variable, optimizers)]

    def _results_like(self, logs: Any) -> Any:
        results = self.model.get_metrics_result()
        if not isinstance(logs, dict) or set(results) != set(logs):
            return logs
        return {key: tf.cast(results[key], value.dtype) for key, value in logs.items()}

    def _recording(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        graph = tf.compat.v1.get_default_graph()

        def compute_and_record(*args: Any, **kwargs: Any) -> Any:
            loss = compute_loss(*args, **kwargs)
            if tf.compat.v1.get_default_graph() is graph:  # an update may be in another function, branch or loop
                self._losses.append(loss)
            return loss

        return compute_and_record

    def inspect(self, update: Update) -> tf.Tensor:
        """Returns whether an update is not finite, a `bool` scalar that is equal on all ranks."""
        engine, losses, step = self.engine, list(self._losses), update.step
        if innermost(update.optimizer) is update.optimizer:
            pairs = [(v.path, grad) for v, grad in zip(update.variables, update.local, strict=True) if grad is not None]
        else:
            pairs = []  # the optimizer handles overflow
        names, local = [name for name, _ in pairs], [grad for _, grad in pairs]
        number = iterations(innermost(update.optimizer))

        def gather() -> tf.Tensor:
            data = tf.reduce_any([False, *(_not_finite(value) for value in self._data)])
            wrong = tf.stack([data, *(_not_finite(value) for value in [*losses, *local])])
            counts = tf.reduce_any(wrong[1:]) if step is None else tf.reduce_any(wrong[1:]) & step.active
            (num_wrong,) = engine.allreduce([tf.cast(counts, tf.int32)])
            # In the scope the sum is not finite, even if all ranks' gradients are: their sum overflowed.
            is_wrong = num_wrong > 0 if step is None or not local else tf.constant(True)

            this = weakref.proxy(self)  # TensorFlow never frees the function

            def record(number: Any, wrong: Any, counts: Any, *losses: Any) -> None:
                bad = [name for name, flag in zip(names, wrong[1 + len(losses) :], strict=False) if flag]
                values = ", ".join(str(np.float64(value)) for value in losses if not np.isfinite(value))
                causes = ["its data"] * bool(wrong[0]) + [f"a loss of {values}"] * bool(values)
                causes += [
                    f"a gradient of {name!r}{f' and {len(bad) - 1} more' if bad[1:] else ''}" for name in bad[:1]
                ]
                this.found.append([int(number), bool(wrong[0] and counts), causes if counts else []])

            scalars = [tf.reduce_sum(loss) for loss in losses]

            def report() -> tf.Tensor:
                tf.numpy_function(record, [tf.convert_to_tensor(number), wrong, counts, *scalars], [])
                self._has_found.assign(True)
                return tf.constant(True)

            # Once a step: later updates follow from the first one that is not finite.
            return tf.cond(is_wrong & ~self._has_found, report, lambda: tf.constant(False))

        if step is None:
            return gather()
        summed = [_not_finite(grad) for grad in update.gradients if grad is not None]
        return tf.cond(tf.reduce_any(summed), gather, lambda: tf.constant(False))


class _InspectReduced(Stage):
    """Checks the gradients of an update before it is applied."""

    phase = "inspect reduced"

    def __init__(self, policy: NaNPolicy) -> None:
        self._policy = policy

    def __call__(self, update: Update, proceed: Callable[[], Any]) -> Any:
        """Checks the gradients; the update depends on the result, so that messages are sent in order."""
        with tf.control_dependencies([self._policy.inspect(update)]):
            update.gradients = [
                each if each is None else tf.nest.map_structure(tf.identity, each) for each in update.gradients
            ]
            return proceed()


def _not_finite(value: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    values = value.values if isinstance(value, tf.IndexedSlices) else value
    return tf.logical_not(tf.reduce_all(tf.math.is_finite(values)))


def _message(step: int, findings: Sequence[Sequence[Any]]) -> str:
    """Returns the message for the findings of all ranks, each `[step, whether its data is wrong, causes]`."""
    any_data = any(is_data for _, is_data, _ in findings)  # then other ranks may be affected by a common statistic
    causes = [
        f"on rank {rank} {', '.join(parts)}"
        for rank, (_, is_data, parts) in enumerate(findings)
        if parts and (is_data or not any_data)
    ]
    reason = "; ".join(causes) or "a sum over the ranks of finite gradients"
    return f"Training step {step} is not finite. Received: {reason}"
