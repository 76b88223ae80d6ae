"""The effective learning rate, which updates use, beside the rate that the user sees.

`optimizer.learning_rate` stays the user's. While an update is traced or run, the optimizer reads that value times a
multiplier, a pure function of the optimizer's steps and a stored origin. Steps are counted by `_iterations`:
`optimizer.iterations` counts updates, of several steps each where gradients are accumulated.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.optimizers import CURRENT_RATE, current_learning_rate, iterations, stored_learning_rate
from kdist.keras_hooks.patching import patched
from kdist.learning_rate.rate_scale import RateScale
from kdist.reports.log import once
from kdist.scaling import LearningRateRule
from kdist.state.comparison import learning_rates

logger = logging.getLogger("kdist")


class EffectiveRate(RateScale):
    """The learning rate that one optimizer's updates use.

    Args:
        optimizer: `keras.optimizers.Optimizer`, the innermost one.
        rule: `LearningRateRule`, the factor and its reason.
        stretch: float, the user's steps in one step: a `LearningRateSchedule` is read at the user's step.

    Attributes:
        rule: `LearningRateRule`, that of the data of the last `fit`.
        is_logged_alone: bool, whether it was the only one in logs: it keeps its key where another one begins later.
        is_reported: bool, whether the rate is logged already.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, rule: LearningRateRule, stretch: float) -> None:
        self.optimizer = optimizer
        self.rule = rule
        self.is_logged_alone = False
        self.is_reported = False
        self._may_be_scaled = rule.factor != 1.0
        self._resumed_warmup: tuple[float, float] | None = None  # the fraction made, and the length in steps
        self._first_step = _num_steps(optimizer)
        self._is_resumed = False
        self._is_told_of_steps = False
        # Variables, so that a second `fit` changes them without another trace.
        self._factor = tf.Variable(rule.factor, dtype=tf.float32, trainable=False, name="kdist_factor")
        self._stretch = tf.Variable(stretch, dtype=tf.float64, trainable=False, name="kdist_stretch")
        # Infinite: not known yet.
        self._warmup_steps = tf.Variable(float("inf"), dtype=tf.float32, trainable=False, name="kdist_warmup_steps")
        self._origin = tf.Variable(_num_steps(optimizer), dtype=tf.float64, trainable=False, name="kdist_origin")
        # For a schedule: a step of this job, and the user's step there, which another job may have reached.
        self._steps_made = tf.Variable([0.0, 0.0], dtype=tf.float64, trainable=False, name="kdist_steps_made")
        # The rate that all ranks know: a callback that sets another one on some ranks only is noticed by it.
        self._agreed = tf.Variable(self._stored(), dtype=tf.float64, trainable=False, name="kdist_agreed_rate")

    @property
    def is_scaled(self) -> bool:
        """Whether updates use another rate than the user's."""
        return self.rule.factor != 1.0

    @property
    def log_key(self) -> str:
        """The key of the effective rate in an epoch's logs."""
        return "effective_learning_rate" + ("" if self.is_logged_alone else f"_{self.optimizer.name}")

    @property
    def warmup_is_known(self) -> bool:
        """Whether the length of the warm-up is known."""
        return bool(tf.math.is_finite(self._warmup_steps))

    @property
    def may_warm_up(self) -> bool:
        """Whether a warm-up begins, or goes on: what is not scaled leaves it to a later `fit`."""
        return self.is_scaled or self._resumed_warmup is not None

    @property
    def warmup_description(self) -> str:
        """A description of the warm-up, for the log."""
        if not self.warmup_is_known:
            return "after a warm-up that begins after the first epoch, when the steps of an epoch are known"
        steps = math.ceil(_number(self._warmup_steps))
        return f"after a warm-up of {steps} step{'s' * (steps != 1)}" if steps else "at once"

    def set_data(self, rule: LearningRateRule, stretch: float) -> None:
        """Sets the factor and the stretch for the data of a `fit`."""
        self.notice_fewer_steps()
        made = _num_steps(self.optimizer)
        if rule.factor != self.rule.factor:
            self.is_reported = False
        self.rule = rule
        self._factor.assign(rule.factor)
        if stretch != _number(self._stretch):
            if made > self._first_step or self._is_resumed:  # by this job, with the former stretch
                self._steps_made.assign([made, float(self._user_steps(made))])
            self._stretch.assign(stretch)

    def notice_fewer_steps(self) -> None:
        """Begins the user's schedule again, and no warm-up, if the script has set the count of steps back."""
        if not self._may_be_scaled and not self.follows_schedule:
            return
        made = _num_steps(self.optimizer)
        self._first_step = min(self._first_step, made)
        if self.warmup_is_known and made < _number(self._origin):
            self._origin.assign(made - _number(self._warmup_steps))
        if made < _number(self._steps_made[0]):
            self._steps_made.assign([0.0, 0.0])

    def anchors(self) -> list[tf.Variable]:
        """Returns what depends on the optimizer's steps, which are rank 0's on all ranks when a `fit` begins."""
        return [self._origin, self._steps_made] if self._may_be_scaled or self.follows_schedule else []

    def set_warmup(self, steps: float) -> None:
        """Sets the length of the warm-up, in steps from the origin."""
        if self._resumed_warmup is not None:  # the same fraction of the new warm-up
            self._origin.assign(_num_steps(self.optimizer) - self._resumed_warmup[0] * steps)
            self._resumed_warmup = None
        elif not self.warmup_is_known:  # nothing was scaled so far
            self._origin.assign(_num_steps(self.optimizer))
        self._warmup_steps.assign(steps)

    def continue_warmup(self) -> None:
        """Continues a resumed warm-up with its length, where that of an epoch is not known yet."""
        if self._resumed_warmup is not None:
            self.set_warmup(self._resumed_warmup[1])

    def multiplier(self, step: Any) -> tf.Tensor:
        """Returns the multiplier at a number of steps, a `float32` scalar (see `scaling.warmup_multiplier`)."""
        step = tf.cast(tf.cast(tf.convert_to_tensor(step), tf.float64) - self._origin, tf.float32)
        share = tf.where(self._warmup_steps > 0, tf.math.divide_no_nan(step, self._warmup_steps), 1.0)
        return 1.0 + (self._factor - 1.0) * tf.clip_by_value(share, 0.0, 1.0)

    def effective(self) -> float:
        """Returns the rate that the next update uses."""
        return float(self._scaled(self._user_rate()))

    @property
    def is_used(self) -> bool:
        """Whether the optimizer has made a step with this rate: a model may hold one that it never calls."""
        return _num_steps(self.optimizer) > self._first_step

    def report(self, why_unchanged: str = "") -> None:
        """Logs the rate; see `EffectiveRates.report`."""
        name, rule, stretch = type(self.optimizer).__name__, self.rule, _number(self._stretch)
        is_of_a_file = self._first_step > 0 and not self._is_resumed
        if self.follows_schedule and stretch != 1.0 and is_of_a_file and not self._is_told_of_steps:
            self._is_told_of_steps = True
            logger.warning(
                f"the learning rate's schedule goes on from steps that this job has not made. Received: a {name} with "
                f"{_num_steps(self.optimizer):.0f} steps, as from a file, each of which counts as {stretch:g} of "
                f"yours. Fix, if one process made them: divide `optimizer.iterations` by {stretch:g}; "
                "BackupAndRestore does without."
            )
        if not rule.is_known:
            logger.warning("learning rate: %s, so it is not scaled; set scale_lr to a rule or a number", rule.why)
            return
        if not self.is_scaled:
            once.info(f"learning rate of {name}: unchanged: {why_unchanged or rule.why}")
            return
        rates = learning_rates([self.optimizer]).values()  # empty for a schedule
        numbers = [f"{old:.4g} x {rule.factor:.4g} = {old * rule.factor:.4g}" for old in rates]
        scaled = numbers[0] if numbers else f"your schedule x {rule.factor:.4g}"
        once.info(f"learning rate of {name}: {scaled} by the {rule.name} rule, {self.warmup_description}")
        once.debug(f"learning rate of {name}: {rule.why}; settings that count batches (save_freq, EMA, ...) stay")

    # The state of a resumed training.

    def progress(self) -> dict[str, Any]:
        """Returns the state of the warm-up and of the user's schedule, as JSON values."""
        warmup_steps = _number(self._warmup_steps)
        return {
            "factor": self.rule.factor,
            "stretch": _number(self._stretch),
            "origin": _number(self._origin),
            "warmup_steps": warmup_steps if self.warmup_is_known else None,
            "steps_made": tf.convert_to_tensor(self._steps_made).numpy().tolist(),
            "user_steps": float(self._user_steps(iterations(self.optimizer))),
        }

    def resume(self, progress: dict[str, Any] | None) -> None:
        """Loads what `progress` has returned on any number of ranks, after the optimizer's iterations are loaded."""
        made, self._is_resumed = _num_steps(self.optimizer), True
        self._agreed.assign(tf.cast(self._stored(), tf.float64))
        now = [self.rule.factor, _number(self._stretch)]
        if progress is not None and [progress["factor"], progress["stretch"]] == now:
            self._origin.assign(progress["origin"])
            self._steps_made.assign(progress["steps_made"])
            if progress["warmup_steps"] is not None:
                self._warmup_steps.assign(progress["warmup_steps"])
            return
        self._steps_made.assign([made, made if progress is None else progress["user_steps"]])
        if progress is None or progress["warmup_steps"] is None:
            self._origin.assign(made if progress is None else progress["origin"])
            return
        length = progress["warmup_steps"]
        share = min(1.0, (made - progress["origin"]) / length) if length else 1.0
        self._resumed_warmup = share, length * progress["stretch"] / now[1]
        if self.warmup_is_known:
            self.set_warmup(_number(self._warmup_steps))

    def _user_steps(self, step: Any) -> Any:
        at, made = self._steps_made[0], self._steps_made[1]
        return made + (tf.cast(tf.convert_to_tensor(step), tf.float64) - at) * self._stretch

    # Agreement on changes of the rate.

    def is_changed(self) -> tf.Tensor:
        """Returns whether a callback has set another rate on this rank: 1 or 0, a `float32` scalar."""
        return tf.cast(self._stored() != self._agreed, tf.float32)

    def local_change(self) -> tf.Tensor:
        """Returns `[is_changed, is_changed * rate]`, a `float64` tensor, to be summed over the ranks."""
        stored = self._stored()
        is_changed = tf.cast(stored != self._agreed, tf.float64)
        return tf.stack([is_changed, is_changed * stored])

    def apply_change(self, change: tf.Tensor) -> None:
        """Sets the mean of the changed rates, given the sum of `local_change` over the ranks."""
        rate = tf.where(change[0] > 0, tf.math.divide_no_nan(change[1], change[0]), self._agreed)
        self._agreed.assign(rate)
        variable = stored_learning_rate(self.optimizer)
        if isinstance(variable, keras.Variable):
            variable.assign(tf.cast(rate, variable.dtype))

    def _stored(self) -> Any:
        variable = stored_learning_rate(self.optimizer)
        # A schedule or a function is the same on all ranks.
        return tf.cast(variable.value, tf.float64) if isinstance(variable, keras.Variable) else tf.zeros((), tf.float64)

    # The methods of `RateScale`, which updates read.

    def scaled(self, rate: Callable[[], Any]) -> tf.Tensor:
        """Returns the rate of the next update: the user's, at the user's step, times the multiplier."""
        return self.current() if self._may_be_scaled or self.follows_schedule else rate()

    def momentum_ratio(self) -> tf.Tensor | None:
        """Returns the multiplier divided by the last step's, a `float32` scalar; `None` if nothing is scaled."""
        if not self._may_be_scaled:
            return None
        now = tf.convert_to_tensor(iterations(self.optimizer))
        return self.multiplier(now) / self.multiplier(now - 1)

    @property
    def follows_schedule(self) -> bool:
        """Whether the user's rate is a `LearningRateSchedule`."""
        return isinstance(stored_learning_rate(self.optimizer), keras.optimizers.schedules.LearningRateSchedule)

    def current(self) -> tf.Tensor:
        """Returns the rate that the next update uses, a scalar tensor."""
        return self._scaled(self._user_rate())

    @contextlib.contextmanager
    def unscaled(self) -> Iterator[None]:
        """A context for an update on one of the user's batches: it has the user's rate, and counts as one step."""
        if not self.follows_schedule:
            yield
            return
        before = tf.cast(tf.identity(iterations(self.optimizer)), tf.float64)
        with patched(self.optimizer, CURRENT_RATE, self._user_rate):
            yield
        now = tf.cast(tf.convert_to_tensor(iterations(self.optimizer)), tf.float64)
        self._steps_made.assign(tf.stack([now, self._user_steps(before) + now - before]))

    def _user_rate(self) -> Any:
        rate = stored_learning_rate(self.optimizer)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            step = iterations(self.optimizer)
            # Not a step too early where the quotient of batches and steps is rounded down.
            return rate(tf.cast(self._user_steps(step) + 1e-6, step.dtype))
        return current_learning_rate(self.optimizer)

    def _scaled(self, rate: Any) -> tf.Tensor:
        rate = tf.convert_to_tensor(rate)
        return rate * tf.cast(self.multiplier(iterations(self.optimizer)), rate.dtype)


def _num_steps(optimizer: keras.optimizers.Optimizer) -> float:
    return _number(iterations(optimizer))


def _number(variable: Any) -> float:
    return float(tf.convert_to_tensor(variable))  # a mirrored variable has no float()
