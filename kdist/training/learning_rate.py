"""The rate that updates use, beside the rate that the user sees.

`optimizer.learning_rate` stays what the user set. While an update is traced or run, the optimizer reads that value
times a multiplier, which is a pure function of the steps that the optimizer has made and a stored origin. The steps are
counted by `_iterations`: where gradients are accumulated, `optimizer.iterations` counts updates, of several steps each.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist.errors import StrategyError
from kdist.scaling import LearningRateRule, learning_rate_rule
from kdist.training.optimizers import innermost, optimizers_of
from kdist.training.step_wrappers import replaced


class EffectiveRate:
    """Scales what one optimizer's updates take as learning rate.

    Args:
        optimizer: `keras.optimizers.Optimizer`, the innermost one.
        rule: `LearningRateRule`, by how much and why.
        stretch: float, how many of the user's steps one step stands for: a `LearningRateSchedule` is read at
            the user's step.

    Attributes:
        is_reported: bool, whether the log says already what is done to it.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, rule: LearningRateRule, stretch: float) -> None:
        self.optimizer = optimizer
        self.rule = rule
        self.is_reported = False
        self._stretch = stretch
        self._resumed_share: float | None = None
        # Variables, so that a second `fit` changes them without a new trace. Infinite: not known yet.
        self._warmup_steps = tf.Variable(float("inf"), dtype=tf.float32, trainable=False, name="kdist_warmup_steps")
        # What every rank takes for the rate: a callback that sets another one on some ranks only is noticed by it.
        self._origin = tf.Variable(_num_steps(optimizer), dtype=tf.float64, trainable=False, name="kdist_origin")
        # The user's steps that were made at a number of this job's, for a schedule: another job may have made them.
        self._steps_made = tf.Variable([0.0, 0.0], dtype=tf.float64, trainable=False, name="kdist_steps_made")
        self._agreed = tf.Variable(self._stored(), dtype=tf.float64, trainable=False, name="kdist_agreed_rate")

    @property
    def is_scaled(self) -> bool:
        """Whether updates take another rate than the user set."""
        return self.rule.factor != 1.0

    @property
    def warmup_is_known(self) -> bool:
        """Whether the length of the warm-up was set."""
        return bool(tf.math.is_finite(self._warmup_steps))

    @property
    def warmup(self) -> str:
        """The warm-up in words."""
        if not self.warmup_is_known:
            return "after a warm-up that begins when the first epoch has told how many steps one has"
        steps = math.ceil(float(self._warmup_steps))
        return f"after a warm-up of {steps} step{'s' * (steps != 1)}" if steps else "at once"

    def set_warmup(self, steps: float) -> None:
        """Sets the length of the warm-up, in steps from the origin."""
        if self._resumed_share is not None:  # as far in the new warm-up as it was in the old
            self._origin.assign(_num_steps(self.optimizer) - self._resumed_share * steps)
            self._resumed_share = None
        elif not self.warmup_is_known:  # until now nothing was scaled: it rises from here on
            self._origin.assign(_num_steps(self.optimizer))
        self._warmup_steps.assign(steps)

    def multiplier(self, iterations: Any) -> tf.Tensor:
        """Returns the multiplier at a number of steps, a `float32` scalar (see `scaling.warmup_multiplier`)."""
        step = tf.cast(tf.cast(tf.convert_to_tensor(iterations), tf.float64) - self._origin, tf.float32)
        share = tf.where(self._warmup_steps > 0, tf.math.divide_no_nan(step, self._warmup_steps), 1.0)
        return 1.0 + (self.rule.factor - 1.0) * tf.clip_by_value(share, 0.0, 1.0)

    def effective(self) -> float:
        """Returns the rate that the next update takes."""
        return float(self._scaled(self._user_rate()))

    # An interrupted training.

    def progress(self) -> dict[str, Any]:
        """Returns where the warm-up and the user's schedule stand, as JSON can write it."""
        warmup_steps = float(self._warmup_steps)
        return {
            "factor": self.rule.factor,
            "stretch": self._stretch,
            "origin": float(self._origin),
            "warmup_steps": warmup_steps if self.warmup_is_known else None,
            "steps_made": [float(each) for each in self._steps_made.numpy()],
            "user_steps": float(self._user_steps(self.optimizer._iterations)),
        }

    def resume(self, progress: dict[str, Any] | None) -> None:
        """Takes up the warm-up and the schedule of an interrupted training, whose iterations the optimizer has already.

        Args:
            progress: what `progress` returned, on any number of ranks; `None` if kdist did nothing to the rate.
        """
        iterations = _num_steps(self.optimizer)
        self._agreed.assign(tf.cast(self._stored(), tf.float64))
        if progress is not None and [progress["factor"], progress["stretch"]] == [self.rule.factor, self._stretch]:
            self._origin.assign(progress["origin"])
            self._steps_made.assign(progress["steps_made"])
            if progress["warmup_steps"] is not None:
                self._warmup_steps.assign(progress["warmup_steps"])
            return
        self._steps_made.assign([iterations, iterations if progress is None else progress["user_steps"]])
        if progress is None or progress["warmup_steps"] is None:
            self._origin.assign(iterations if progress is None else progress["origin"])
            return
        made, length = iterations - progress["origin"], progress["warmup_steps"]
        self._resumed_share = min(1.0, made / length) if length else 1.0
        if self.warmup_is_known:
            self.set_warmup(float(self._warmup_steps))

    def _user_steps(self, iterations: Any) -> Any:
        at, made = self._steps_made[0], self._steps_made[1]
        return made + (tf.cast(tf.convert_to_tensor(iterations), tf.float64) - at) * self._stretch

    # The rate of all ranks.

    def is_asked_for(self) -> tf.Tensor:
        """Returns whether this rank's user asks for another rate: 1 or 0, a `float32` scalar."""
        return tf.cast(self._stored() != self._agreed, tf.float32)

    def request(self) -> tf.Tensor:
        """Returns `[asks, rate if it asks]`, a `float64` tensor, whose sum over the ranks `agree` takes."""
        stored = self._stored()
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
        if not self.is_scaled and not self.follows_schedule:
            yield
            return
        optimizer, update = self.optimizer, self.optimizer._backend_apply_gradients

        def corrected_update(*args: Any, **kwargs: Any) -> Any:
            # As late as this: a step whose gradients are not finite does not come here, and is not counted either.
            now = tf.convert_to_tensor(optimizer._iterations)
            correct_momentum(optimizer, self.multiplier(now) / self.multiplier(now - 1))
            return update(*args, **kwargs)

        with (
            replaced(optimizer, "_get_current_learning_rate", self.current),
            replaced(optimizer, "_backend_apply_gradients", corrected_update if self.is_scaled else update),
        ):
            yield

    @property
    def follows_schedule(self) -> bool:
        """Whether the user's rate is a `LearningRateSchedule`."""
        return isinstance(self.optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule)

    def current(self) -> tf.Tensor:
        """Returns the rate that the next update takes, as the optimizer would read the user's."""
        return self._scaled(self._user_rate())

    def _user_rate(self) -> Any:
        rate = self.optimizer._learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            iterations = self.optimizer._iterations
            return rate(tf.cast(self._user_steps(iterations), iterations.dtype))
        return type(self.optimizer)._get_current_learning_rate(self.optimizer)

    def _scaled(self, rate: Any) -> tf.Tensor:
        rate = tf.convert_to_tensor(rate)
        return rate * tf.cast(self.multiplier(self.optimizer._iterations), rate.dtype)


def _num_steps(optimizer: keras.optimizers.Optimizer) -> float:
    return float(tf.convert_to_tensor(optimizer._iterations))  # a mirrored one is no number by itself


def correct_momentum(optimizer: keras.optimizers.Optimizer, ratio: tf.Tensor) -> None:
    r"""Rescales velocities that hold the last step's rate (Goyal et al., 2017, section 2.1, remark 2).

    Only SGD's do. Keras' update is $v' = m v - \eta g$, and the paper's $u' = m u + g$ with $v = -\eta u$.

    Args:
        optimizer: `keras.optimizers.Optimizer`, before its update; optimizers without such velocities are left alone.
        ratio: scalar float tensor, this step's rate over the last step's.
    """
    kept = getattr(optimizer, "momentums", None) if isinstance(optimizer, keras.optimizers.SGD) else None
    velocities = [each for each in kept or () if each is not None]  # the scales of float8 layers have none
    if not velocities:
        return

    def correct() -> None:
        for velocity in velocities:
            velocity.assign(velocity * tf.cast(ratio, velocity.dtype))

    tf.cond(tf.not_equal(ratio, 1.0), correct, lambda: None)


class EffectiveRates:
    """The effective rates of a model's optimizers, each made when it is first asked for.

    Args:
        model: `keras.Model`.
        scale_lr: as `kdist.scope` takes it.
        scale_batch: bool, whether the global batch grows with the ranks.
        size: int, the number of ranks.
    """

    def __init__(self, model: keras.Model, *, scale_lr: str | float | None, scale_batch: bool, size: int) -> None:
        self._model = model
        self._scale_lr = scale_lr
        self._scale_batch = scale_batch
        self._size = size
        self._rates: dict[int, EffectiveRate] = {}

    def of(self, optimizer: keras.optimizers.Optimizer) -> EffectiveRate:
        """Returns the effective rate of an innermost optimizer.

        Raises:
            StrategyError: if one factor was asked for, and the optimizer is a `MultiOptimizer`.
        """
        rate = self._rates.get(id(optimizer))
        if rate is None or rate.optimizer is not optimizer:
            if hasattr(optimizer, "optimizers") and self._scale_lr not in ("auto", None, 1.0):
                raise StrategyError(
                    f"One factor is no rule for several rates. Received: scale_lr={self._scale_lr!r}, and a "
                    "MultiOptimizer, whose parts have rates of their own. Expected 'auto' or None, which leave them "
                    "alone. Fix: give the parts the rates that they are to have, and scale_lr=None."
                )
            rule = learning_rate_rule(
                self._scale_lr, type(optimizer).__name__, self._size, scale_batch=self._scale_batch
            )
            # With a larger global batch an epoch has fewer steps: a schedule is to cover it all the same.
            stretch = float(self._size) if self._scale_batch and self._scale_lr is not None else 1.0
            held = {id(innermost(each)) for each in optimizers_of(self._model)}
            self._rates = {key: rate for key, rate in self._rates.items() if key in held}  # not those of old compiles
            with tf.init_scope():
                rate = self._rates[id(optimizer)] = EffectiveRate(optimizer, rule, stretch)
        return rate

    def all(self) -> list[EffectiveRate]:
        """Returns those of all optimizers that the model holds."""
        return [self.of(innermost(optimizer)) for optimizer in optimizers_of(self._model)]
