"""What happens when a loss or a gradient is not finite, decided by all ranks together."""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.callbacks.engine_callback import EngineCallback
from kdist.engines.engine import Engine
from kdist.errors import NotFiniteError, StrategyError
from kdist.training.optimizers import innermost, is_learning_rate, optimizers_of
from kdist.training.state import variables_of
from kdist.training.step_wrappers import replaced, step_wrappers

logger = logging.getLogger("kdist")

ACTIONS = ("raise", "skip")


class NaNPolicy(EngineCallback):
    """Ends the training, or leaves the step out, when a loss or a gradient is NaN or infinite.

    All ranks do the same in the same step, and the message names the step, the ranks it came from, and their loss or
    the variables whose gradients are not finite. In `kdist.scope()` the gradients of all ranks are looked at when
    they are summed, which costs no message; a loss that is not finite while all gradients are is noticed at the end
    of the epoch. Without the scope, ranks ask each other at every step.

    With `"skip"`, weights, statistics, optimizer, random state and metrics are as if the step had not been, and
    `skipped_steps` is in the epoch's logs. That takes a copy of all of them in every step. What a
    `LossScaleOptimizer` does about overflow is left to it: only its losses count.

    Collective: every rank must call this, in the same order.

    Args:
        action: `"raise"` or `"skip"`.
        engine: `Engine` or `None`, how the ranks talk to each other: by default as those of the model's scope do.

    Raises:
        NotFiniteError: on all ranks, after the step, if `action="raise"`; the weights are not usable then.
        StrategyError: if `action` is not understood.

    Example:
    ```python
    model.fit(x, y, callbacks=[kdist.callbacks.NaNPolicy("skip")])
    ```
    """

    def __init__(self, action: str = "raise", engine: Engine | None = None) -> None:
        if action not in ACTIONS:
            raise StrategyError(
                f"NaNPolicy does not know what to do. Received: action={action!r}. Expected one of "
                f"{', '.join(map(repr, ACTIONS))}. Fix: choose one of these."
            )
        super().__init__(engine)
        self.action = action
        self._found: list[list[Any]] = []
        self._num_skipped = 0
        self._data: list[tf.Tensor] = []
        self._losses: list[tf.Tensor] = []
        self._verdicts: list[tf.Tensor] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to watch the model's step."""
        self.refuse_ranks_apart()
        self._found = []
        step_wrappers(self.model).put(self._around_step)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends it."""
        step_wrappers(self.model).take_off(self._around_step)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts anew."""
        self._num_skipped = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Says what was found in the step, or raises it."""
        found, self._found = self._found, []
        for step in found:  # the same steps on all ranks
            self._num_skipped += 1
            left_out = "; the step is left out on all ranks" * (self.action == "skip")
            self._act(_message(step[0], self.engine.gather_objects(step)) + left_out)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the number of steps that were left out, and looks at the epoch's loss."""
        if logs is None:
            return
        loss = logs.get("loss", 0.0)
        if "_kdist" in self.model.__dict__ and not math.isfinite(loss):  # everyone's, there
            self._act(
                f"The training is not finite. Received: the loss of epoch {epoch} is {loss}, with finite gradients"
            )
        if self.action == "skip":
            logs["skipped_steps"] = self._num_skipped

    def _act(self, message: str) -> None:
        if self.action == "raise":
            step_wrappers(self.model).take_off(self._around_step)  # nobody calls `on_train_end` now
            raise NotFiniteError(
                f"{message}. Expected finite losses and gradients. Fix: look at these rows and at the learning rate, "
                'or leave such steps out with NaNPolicy("skip").'
            )
        if self.engine.rank == 0:
            logger.warning("%s.", message)

    # In the step.

    def _around_step(self, step: Callable[[Any], Any], data: Any) -> Any:
        leaves = tf.nest.flatten(data, expand_composites=True)
        self._data = [leaf for leaf in leaves if tf.is_tensor(leaf) and leaf.dtype.is_floating]
        self._losses, self._verdicts = [], []
        kept = self._kept() if self.action == "skip" else []
        before = [tf.identity(variable) for variable in kept]
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(self.model, "compute_loss", self._noting(self.model.compute_loss)))
            for optimizer in optimizers_of(self.model):
                stack.enter_context(self._judged(optimizer))
            logs = step(data)
        if not kept or not self._verdicts:
            return logs

        def undo() -> Any:
            for variable, value in zip(kept, before, strict=True):
                variable.assign(value)
            return self._results_like(logs)

        return tf.cond(tf.reduce_any(self._verdicts), undo, lambda: logs)

    def _kept(self) -> list[tf.Variable]:
        """Returns what a step writes, but the learning rate: that is what callbacks of all ranks agreed on in it."""
        optimizers = optimizers_of(self.model)
        variables = [
            each for each in [*variables_of(self.model), *self.model.metrics_variables] if each.dtype != "string"
        ]
        return [variable.value for variable in variables if not is_learning_rate(variable, optimizers)]

    def _results_like(self, logs: Any) -> Any:
        results = self.model.get_metrics_result()
        if not isinstance(logs, dict) or set(results) != set(logs):
            return logs
        return {key: tf.cast(results[key], value.dtype) for key, value in logs.items()}

    def _noting(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        def compute_and_note(*args: Any, **kwargs: Any) -> Any:
            loss = compute_loss(*args, **kwargs)
            self._losses.append(loss)
            return loss

        return compute_and_note

    @contextlib.contextmanager
    def _judged(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        """Looks at an optimizer's gradients before it applies them, while a step is traced."""
        apply = optimizer.apply

        def judge_and_apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            grads = list(grads)
            variables = list(trainable_variables or innermost(optimizer)._trainable_variables)
            verdict = self._verdict(optimizer, grads, variables)
            self._verdicts.append(verdict)
            with tf.control_dependencies([verdict]):  # its messages come before those of what follows
                grads = [grad if grad is None else tf.nest.map_structure(tf.identity, grad) for grad in grads]
                return apply(grads, trainable_variables)

        with replaced(optimizer, "apply", judge_and_apply):
            yield

    def _verdict(self, optimizer: keras.optimizers.Optimizer, grads: list[Any], variables: list[Any]) -> tf.Tensor:
        """Returns whether the step is to be left out, a `bool` scalar that is the same on all ranks."""
        engine, losses = self.engine, list(self._losses)
        own_step = getattr(self.model.distribute_strategy.extended, "step", None)
        local = grads if own_step is None else own_step.local_gradients
        if innermost(optimizer) is not optimizer:
            local = [None] * len(local)  # overflow is its own affair
        names = [variable.path for variable, grad in zip(variables, local, strict=True) if grad is not None]
        local = [grad for grad in local if grad is not None]
        iterations = innermost(optimizer)._iterations

        def ask() -> tf.Tensor:
            data = tf.reduce_any([False, *(_not_finite(value) for value in self._data)])
            wrong = tf.stack([data, *(_not_finite(value) for value in [*losses, *local])])
            counts = tf.reduce_any(wrong[1:]) if own_step is None else tf.reduce_any(wrong[1:]) & own_step.active
            (num_wrong,) = engine.allreduce([tf.cast(counts, tf.int32)])
            # In the scope the sum is not finite, even if no rank's part is to blame: finite numbers overflowed.
            verdict = num_wrong > 0 if own_step is None or not local else tf.constant(True)

            this = weakref.proxy(self)  # TensorFlow keeps the function for good

            def note(step: Any, wrong: Any, counts: Any, *losses: Any) -> None:
                bad = [name for name, is_wrong in zip(names, wrong[1 + len(losses) :], strict=False) if is_wrong]
                values = ", ".join(str(np.float64(value)) for value in losses if not np.isfinite(value))
                said = ["its data"] * bool(wrong[0]) + [f"a loss of {values}"] * bool(values)
                said += [f"a gradient of {name!r}{f' and {len(bad) - 1} more' if bad[1:] else ''}" for name in bad[:1]]
                this._found.append([int(step), bool(wrong[0] and counts), said if counts else []])

            scalars = [tf.reduce_sum(loss) for loss in losses]

            def say() -> tf.Tensor:
                tf.numpy_function(note, [tf.convert_to_tensor(iterations), wrong, counts, *scalars], [])
                return tf.constant(True)

            return tf.cond(verdict, say, lambda: tf.constant(False))

        if own_step is None:
            return ask()
        summed = [_not_finite(grad) for grad in grads if grad is not None]
        return tf.cond(tf.reduce_any(summed), ask, lambda: tf.constant(False))


def _not_finite(value: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    values = value.values if isinstance(value, tf.IndexedSlices) else value
    return tf.logical_not(tf.reduce_all(tf.math.is_finite(values)))


def _message(step: int, everyone: Sequence[Sequence[Any]]) -> str:
    """Returns what all ranks say of a step, each `[step, whether its data is wrong, what is wrong]`."""
    to_blame = any(is_data for _, is_data, _ in everyone)  # then others may have it from there, by a common statistic
    said = [
        f"on rank {rank} {', '.join(parts)}"
        for rank, (_, is_data, parts) in enumerate(everyone)
        if parts and (is_data or not to_blame)
    ]
    reason = "; ".join(said) or "a sum over the ranks of finite gradients"
    return f"Training step {step} is not finite. Received: {reason}"
