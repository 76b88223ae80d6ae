"""Fault injection: a rank fails at a given step, so that you can test how your job recovers."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

import keras
import tensorflow as tf

from kdist.callbacks.engine_callback import engine_of
from kdist.errors import StrategyError
from kdist.keras_hooks.patching import patched
from kdist.step.extensions import step_extensions

Kind = Literal["raise", "exit", "kill", "stop", "slow", "corrupt"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class FaultError(Exception):
    """The exception of `Fault("raise")`. It is not in `kdist.errors`, because it stands for a bug of yours."""


class Fault(keras.callbacks.Callback):
    """Makes one rank fail in a step of `fit`; the other ranks do nothing.

    - `"raise"`: `FaultError` in the callback, as a bug of yours.
    - `"exit"`: `sys.exit(code)`, as a script that exits on one rank.
    - `"kill"`: SIGKILL, as the kernel when memory runs out, or a machine that is lost.
    - `"stop"`: SIGSTOP, as a machine that hangs: the process exists and does not run.
    - `"slow"`: this step and all later ones take `seconds` longer.
    - `"corrupt"`: the rank's part of the gradient is multiplied by `factor` in this step, through `compute_loss`.

    Works in `kdist.scope()` over all-reduce, and in one process, which is rank 0. With parameter servers only the chief
    can fail, as rank 0: the workers run no callbacks.

    Args:
        kind: str, one of the above.
        rank: int, the rank that fails.
        step: int, the step of this `fit` in which it fails, over all epochs, from 0. With `steps_per_execution` an
            execution counts as one.
        code: int, the exit code of `"exit"`.
        seconds: float, for `"slow"`.
        factor: float, for `"corrupt"`; NaN makes the gradient NaN.

    Raises:
        FaultError: on the rank that fails, if `kind="raise"`.
        ScopeError: when training begins, if there are several ranks and the model is in no scope.
        StrategyError: if the kind, rank or step is invalid, or for `kind="corrupt"` if the model's `train_step` does
            not call `compute_loss`.

    Example:
    ```python
    backup = kdist.callbacks.BackupAndRestore("backup")
    model.fit(x, y, callbacks=[backup, kdist.testing.Fault("kill", rank=1, step=100)])
    ```
    """

    def __init__(
        self,
        kind: Kind,
        *,
        rank: int = 0,
        step: int = 0,
        code: int = 1,
        seconds: float = 0.1,
        factor: float = float("nan"),
    ) -> None:
        if kind not in KINDS:
            raise StrategyError(
                f"Unknown kind of fault. Received: kind={kind!r}. Expected one of {', '.join(map(repr, KINDS))}. Fix: "
                "choose one of these."
            )
        if step < 0:
            raise StrategyError(
                f"The step of a fault is negative. Received: step={step}. Expected at least 0. Fix: count steps from 0."
            )
        super().__init__()
        self._kind = kind
        self._rank = rank
        self._step = step
        self._code = code
        self._seconds = seconds
        self._factor = factor
        self._next = 0
        self._is_mine = False
        self._now: tf.Variable | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resets the step count, and determines whether this rank fails."""
        engine = engine_of(self.model, type(self).__name__)
        if not 0 <= self._rank < engine.size:
            raise StrategyError(
                f"The rank of a fault does not exist. Received: rank={self._rank} in a job of {engine.size}. Expected "
                f"0 to {engine.size - 1}. Fix: choose one of these ranks."
            )
        self._next, self._is_mine = 0, engine.rank == self._rank
        if self._kind == "corrupt":
            self._now = tf.Variable(False, trainable=False, name="kdist_fault_now")
            step_extensions(self.model).add(self, around=self._around_step)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the model's step."""
        if self._kind == "corrupt":
            step_extensions(self.model).remove(self)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Fails if this is the rank and the step."""
        step, self._next = self._next, self._next + 1
        if not self._is_mine:
            return
        if self._now is not None:
            self._now.assign(step == self._step)
        elif self._kind == "slow" and step >= self._step:
            time.sleep(self._seconds)
        elif step == self._step:
            _fail(self._kind, self._rank, step, self._code)

    def _around_step(self, step: Callable[[Any], Any], data: Any) -> Any:
        compute_loss, called = self.model.compute_loss, []

        def compute_and_corrupt(*args: Any, **kwargs: Any) -> Any:
            called.append(True)
            loss = compute_loss(*args, **kwargs)
            return loss * tf.where(self._now, tf.cast(self._factor, loss.dtype), tf.ones((), loss.dtype))

        with patched(self.model, "compute_loss", compute_and_corrupt):
            logs = step(data)
        if not called:
            raise StrategyError(
                "Fault cannot corrupt this model's gradient. Received: a train_step that does not call "
                "`self.compute_loss`. Expected one that does. Fix: call it, or corrupt the data of one rank."
            )
        return logs


def _fail(kind: str, rank: int, step: int, code: int) -> None:
    if kind == "raise":
        raise FaultError(f"injected fault on rank {rank} in step {step}")
    if kind == "exit":
        sys.exit(code)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
