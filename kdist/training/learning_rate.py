"""The rate that updates use, beside the rate that the user sees.

`optimizer.learning_rate` stays what the user set. While an update is traced or run, the optimizer reads that value
times a multiplier, which is a pure function of `optimizer.iterations` and a stored origin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist.scaling import LearningRateRule


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer that holds the learning rate: the inner one of a `LossScaleOptimizer`."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


class EffectiveRate:
    """Scales what one optimizer's updates take as learning rate.

    Args:
        optimizer: `keras.optimizers.Optimizer`, the innermost one.
        rule: `LearningRateRule`, by how much and why.
        stretch: float, how many of the user's steps one step stands for: a `LearningRateSchedule` is read at
            `iterations * stretch`.

    Attributes:
        is_reported: bool, whether the log says already what is done to it.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, rule: LearningRateRule, stretch: float) -> None:
        self.optimizer = optimizer
        self.rule = rule
        self.is_reported = False
        self._stretch = stretch
        self._origin = int(optimizer.iterations)
        # Variables, so that a second `fit` changes them without a new trace. Infinite: not known yet.
        self._warmup_steps = tf.Variable(float("inf"), dtype=tf.float32, trainable=False, name="kdist_warmup_steps")
        # What every rank takes for the rate: a callback that sets another one on some ranks only is noticed by it.
        self._agreed = tf.Variable(self._stored(), dtype=tf.float64, trainable=False, name="kdist_agreed_rate")

    @property
    def is_scaled(self) -> bool:
        """Whether updates take another rate than the user set."""
        return self.rule.factor != 1.0

    @property
    def warmup_is_known(self) -> bool:
        """Whether the length of the warm-up was set."""
        return bool(tf.math.is_finite(self._warmup_steps))

    def set_warmup(self, steps: float) -> None:
        """Sets the length of the warm-up, in steps from the origin."""
        self._warmup_steps.assign(steps)

    def multiplier(self, iterations: Any) -> tf.Tensor:
        """Returns the multiplier at a number of iterations, a `float32` scalar (see `scaling.warmup_multiplier`)."""
        step = tf.cast(tf.convert_to_tensor(iterations), tf.float32) - float(self._origin)
        share = tf.where(self._warmup_steps > 0, tf.math.divide_no_nan(step, self._warmup_steps), 1.0)
        return 1.0 + (self.rule.factor - 1.0) * tf.clip_by_value(share, 0.0, 1.0)

    def effective(self) -> float:
        """Returns the rate that the next update takes."""
        return float(self._scaled(self._user_rate()))

    # The rate of all ranks.

    def request(self) -> tf.Tensor:
        """Returns `[asks, rate if it asks]`, a `float64` tensor: whether this rank's user asks for another rate."""
        stored = tf.cast(self._stored(), tf.float64)
        asks = tf.cast(stored != self._agreed, tf.float64)
        return tf.stack([asks, asks * stored])

    def agree(self, requests: tf.Tensor) -> None:
        """Sets the rate that was asked for, given the sum of all ranks' requests."""
        rate = tf.where(requests[0] > 0, tf.math.divide_no_nan(requests[1], requests[0]), self._agreed)
        self._agreed.assign(rate)
        variable = self.optimizer._learning_rate
        if isinstance(variable, keras.Variable):
            variable.assign(tf.cast(rate, variable.dtype))

    def _stored(self) -> Any:
        variable = self.optimizer._learning_rate
        # A schedule or a function is the same on all ranks: there is nothing to ask for.
        return tf.cast(variable.value, tf.float64) if isinstance(variable, keras.Variable) else tf.zeros((), tf.float64)

    # What the update reads.

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Lets the optimizer read the effective rate while the context is open."""
        optimizer = self.optimizer
        if not self.is_scaled and self._stretch == 1.0:
            yield
            return
        optimizer.__dict__["_get_current_learning_rate"] = lambda: self._scaled(self._user_rate())
        try:
            if self.is_scaled:
                self._correct_momentum()
            yield
        finally:
            del optimizer.__dict__["_get_current_learning_rate"]

    def _user_rate(self) -> Any:
        rate = self.optimizer._learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            iterations = self.optimizer._iterations
            if self._stretch == 1.0:
                return rate(iterations)
            return rate(tf.cast(tf.cast(iterations, tf.float64) * self._stretch, iterations.dtype))
        return type(self.optimizer)._get_current_learning_rate(self.optimizer)

    def _scaled(self, rate: Any) -> tf.Tensor:
        rate = tf.convert_to_tensor(rate)
        return rate * tf.cast(self.multiplier(self.optimizer.iterations), rate.dtype)

    def _correct_momentum(self) -> None:
        """Rescales velocities that hold the last step's rate (Goyal et al., 2017, section 2.1, remark 2)."""
        velocities = getattr(self.optimizer, "momentums", None) if type(self.optimizer).__name__ == "SGD" else None
        if not velocities:
            return
        now = tf.convert_to_tensor(self.optimizer.iterations)
        ratio = self.multiplier(now) / self.multiplier(now - 1)

        def correct() -> None:
            for velocity in velocities:
                velocity.assign(velocity * tf.cast(ratio, velocity.dtype))

        tf.cond(tf.not_equal(ratio, 1.0), correct, lambda: None)
