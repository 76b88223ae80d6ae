"""A multiplier of the learning rate that follows the epochs."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.errors import DataError, ScopeError
from kdist.keras_hooks.optimizers import innermost, iterations, optimizers_of
from kdist.learning_rate.rate_scale import RateScale
from kdist.state.session import session_of
from kdist.state.single_process import is_replaying
from kdist.step.extensions import step_extensions
from kdist.step.scale_rate import ScaleRate


class LearningRateSchedule(keras.callbacks.Callback):
    """Multiplies the learning rate by a function of the epoch.

    The multiplier of each step is a pure function of `epoch + step / steps of an epoch`, the same for all updates in
    the step. It is correct with `initial_epoch`, in resumed trainings, on another number of ranks, with several steps
    per execution, and with several optimizers. The stored `optimizer.learning_rate`, a number or a
    `keras.optimizers.schedules.LearningRateSchedule`, is unchanged, and other callbacks may set it. The multipliers of
    several such callbacks, and of `kdist.scope(scale_lr=...)`, are multiplied. The rate in use is in the epoch's logs
    as `effective_learning_rate`.

    It sends no messages, but all ranks must have it, or their weights differ.

    Args:
        multiplier: callable that takes the epoch, a float, fractional within an epoch, and returns the multiplier; or a
            mapping from epochs, also fractional ones, to the multiplier from there on; it is 1 before the first.
        momentum_correction: bool, whether SGD's velocities are rescaled when the rate changes.
        steps_per_epoch: int or `None`, the steps of an epoch in the progress bar, for data of unknown length.

    Attributes:
        is_collective: bool, whether `fit` checks that all ranks were given this callback.

    Raises:
        DataError: when training begins, if the number of steps is not known.
        ScopeError: when training begins, if the optimizer is a `MultiOptimizer`, or this process has several replicas.

    Example:
    ```python
    kdist.callbacks.LearningRateSchedule({30: 0.1, 60: 0.01, 80: 0.001})
    kdist.callbacks.LearningRateSchedule(lambda epoch: 0.97**epoch)
    ```

    References:
        - Goyal et al., [Accurate, Large Minibatch SGD](https://arxiv.org/abs/1706.02677), 2017, section 3
    """

    is_collective = True
    reads_state_between_steps = False
    _kdist_saved = ("_last_updates",)  # see `KDIST_SAVED`

    def __init__(
        self,
        multiplier: Callable[[float], float] | Mapping[float, float],
        *,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.multiplier = piecewise(multiplier) if isinstance(multiplier, Mapping) else multiplier
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch, self._is_filled = 0, False
        self._table: Any = None  # made when training begins: a variable without a shape cannot be copied
        self._place: Any = None
        self._last: dict[int, tf.Variable] = {}  # of each optimizer, its updates and the multiplier of the last one
        self._corrected: set[int] = set()  # the optimizers whose velocities the step has rescaled

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy has, as tuners make them: it makes variables of its own."""
        return {**vars(self), "_table": None, "_place": None, "_last": {}}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Adds the stage that scales the rate."""
        session_of(self.model).check_step_extension(type(self).__name__)
        if any(hasattr(innermost(each), "optimizers") for each in optimizers_of(self.model)):
            raise ScopeError(
                f"{type(self).__name__} needs an optimizer of one learning rate. Received: a MultiOptimizer, which has "
                "several. Expected another optimizer. Fix: give its parts keras.optimizers.schedules."
            )
        if self._num_steps() is None:
            raise DataError(
                f"{type(self).__name__} needs the number of steps of an epoch. Received: data of unknown length. "
                "Expected data of known length, or `steps_per_epoch`. Fix: give fit or this callback "
                "`steps_per_epoch`."
            )
        if self._table is None:
            self._make_variables()
        self._last = {}
        step_extensions(self.model).add(self, around=self._around_step, stages=[ScaleRate(self._scale_of)])

    def _make_variables(self) -> None:
        with tf.init_scope():
            # The multipliers of an epoch, from the step before its first one, which the graph reads.
            self._table = tf.Variable([1.0], shape=[None], dtype=tf.float64, trainable=False, name="kdist_multipliers")
            # Counts steps; an optimizer's iterations count its updates, of which a step may make several or none.
            self._place = tf.Variable(0, dtype=tf.int64, trainable=False, name="kdist_multipliers_place")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the epoch."""
        self._epoch, self._is_filled = epoch, False

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Fills the table of the epoch at its first new batch: a resumed epoch begins later."""
        if self._is_filled or is_replaying(self.model):
            return
        self._is_filled = True
        num_steps = self._num_steps() or 1
        epochs = (self._epoch + step / num_steps for step in range(-1, num_steps))
        self._place.assign(batch)  # the step before
        self._table.assign(np.array([self.multiplier(max(0.0, epoch)) for epoch in epochs]))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the effective rate to the logs."""
        if logs is None:
            return
        rates = {id(rate.optimizer): rate for rate in session_of(self.model).rates()}
        optimizers = [innermost(each) for each in optimizers_of(self.model)]
        if len(optimizers) > 1:  # a model may hold one that it never calls
            optimizers = [
                each
                for each in optimizers
                if (rates[id(each)].is_used if id(each) in rates else int(iterations(each)) > 0)
            ]
        for optimizer in optimizers:
            rate = rates.get(id(optimizer))
            if rate is None:
                key = "effective_learning_rate" + (f"_{optimizer.name}" if len(optimizers) > 1 else "")
                own = float(optimizer.learning_rate)
            else:
                key, own = rate.log_key, rate.effective()
            logs[key] = logs.get(key, own) * float(self.multiplier_now(optimizer))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Removes the stage."""
        step_extensions(self.model).remove(self)

    def multiplier_now(self, optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
        """Returns an innermost optimizer's multiplier in the running or last step, a `float64` scalar."""
        return tf.gather(self._table, tf.clip_by_value(self._place, 0, tf.size(self._table, tf.int64) - 1))

    def momentum_ratio(self, optimizer: keras.optimizers.Optimizer) -> tf.Tensor | None:
        """Returns the multiplier divided by the last update's, 1 after 0; `None` after the first update of a step."""
        if not self.momentum_correction or id(optimizer) in self._corrected:
            return None
        self._corrected.add(id(optimizer))
        last = self._last_of(optimizer)[1]
        return tf.where(last > 0, tf.math.divide_no_nan(self.multiplier_now(optimizer), last), 1.0)

    def _around_step(self, step: Callable[[Any], Any], data: Any) -> Any:
        self._corrected.clear()
        for optimizer in map(innermost, optimizers_of(self.model)):
            self._note_last_update(optimizer)
        self._place.assign_add(1)
        return step(data)

    @property
    def _last_updates(self) -> list[list[float]]:
        """The updates of each optimizer, and the multiplier of the last one, which checkpoints contain."""
        return [self._last_of(each).numpy().tolist() for each in map(innermost, optimizers_of(self.model))]

    @_last_updates.setter
    def _last_updates(self, values: list[list[float]]) -> None:
        for optimizer, value in zip(map(innermost, optimizers_of(self.model)), values, strict=False):
            self._last_of(optimizer).assign(value)

    def _last_of(self, optimizer: keras.optimizers.Optimizer) -> tf.Variable:
        if id(optimizer) not in self._last:
            with tf.init_scope():  # -1 update: the first step's predecessor counts as an update
                self._last[id(optimizer)] = tf.Variable([-1.0, 1.0], dtype=tf.float64, trainable=False)
        return self._last[id(optimizer)]

    def _note_last_update(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Notes the last step's multiplier, if the optimizer has made an update since: not one that was skipped."""
        last, made = self._last_of(optimizer), tf.cast(tf.convert_to_tensor(iterations(optimizer)), tf.float64)
        last.assign(tf.where(made == last[0], last, tf.stack([made, self.multiplier_now(optimizer)])))

    def _num_steps(self) -> int | None:
        return self.steps_per_epoch or self.params.get("steps")

    def _scale_of(self, optimizer: keras.optimizers.Optimizer) -> RateScale:
        return _Multiplier(self, optimizer)


class _Multiplier:
    """The `RateScale` of one optimizer."""

    def __init__(self, schedule: LearningRateSchedule, optimizer: keras.optimizers.Optimizer) -> None:
        self._schedule = schedule
        self._optimizer = optimizer

    def scaled(self, rate: Callable[[], Any]) -> tf.Tensor:
        """Returns the rate times the multiplier of the step."""
        value = tf.convert_to_tensor(rate())
        return value * tf.cast(self._schedule.multiplier_now(self._optimizer), value.dtype)

    def momentum_ratio(self) -> tf.Tensor | None:
        """Returns the ratio by which the velocities are multiplied."""
        return self._schedule.momentum_ratio(self._optimizer)


def piecewise(multipliers: Mapping[float, float]) -> Callable[[float], float]:
    """Returns the function of the epoch that has each multiplier from its epoch on, and 1 before the first.

    Args:
        multipliers: mapping from epochs to multipliers.

    Example:
    >>> piecewise({30: 0.1, 60: 0.01})(45.5)
    0.1
    """
    epochs = sorted(multipliers)

    def multiplier(epoch: float) -> float:
        # 1e-9: fractions are rounded.
        place = bisect.bisect_right(epochs, epoch + 1e-9)
        return float(multipliers[epochs[place - 1]]) if place else 1.0

    return multiplier
