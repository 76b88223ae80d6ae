"""The effective learning rate, which updates use, beside the rate that the user sees.

`optimizer.learning_rate` stays the user's. While an update is traced or run, the optimizer reads that value times a
multiplier, a pure function of the optimizer's steps and a stored origin. Steps are counted by `_iterations`:
`optimizer.iterations` counts updates, of several steps each where gradients are accumulated.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kdist.keras_hooks.optimizers import CURRENT_RATE, current_learning_rate, iterations, stored_learning_rate
from kdist.keras_hooks.patching import patched
from kdist.keras_hooks.variables import number_of
from kdist.learning_rate.agreed_rate import AgreedRate
from kdist.learning_rate.rate_scale import RateScale
from kdist.learning_rate.user_steps import UserSteps
from kdist.learning_rate.warmup import Warmup
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
        agreed: `AgreedRate`, the user's rate as all ranks know it.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, rule: LearningRateRule, stretch: float = 1.0) -> None:
        self.optimizer = optimizer
        self.rule = rule
        self.is_logged_alone = False
        self.is_reported = False
        self.agreed = AgreedRate(optimizer)
        self._may_be_scaled = rule.factor != 1.0
        self._first_step = self._num_steps()
        self._is_resumed = False
        self._is_told_of_steps = False
        self._warmup = Warmup(rule.factor, self._first_step)
        self._user_steps = UserSteps(stretch)

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
        return self._warmup.is_known

    @property
    def may_warm_up(self) -> bool:
        """Whether a warm-up begins, or goes on: what is not scaled leaves it to a later `fit`."""
        return self.is_scaled or self._warmup.is_resumed

    def set_data(self, rule: LearningRateRule, stretch: float) -> None:
        """Sets the factor and the stretch for the data of a `fit`."""
        self.notice_fewer_steps()
        made = self._num_steps()
        if rule.factor != self.rule.factor:
            self.is_reported = False
        self.rule = rule
        self._warmup.set_factor(rule.factor)
        if stretch != self._user_steps.stretch:
            if made > self._first_step or self._is_resumed:  # by this job, with the former stretch
                self._user_steps.set_known(made, self._user_steps.at(made))
            self._user_steps.set_stretch(stretch)

    def notice_fewer_steps(self) -> None:
        """Begins the user's schedule again, and no warm-up, if the script has set the count of steps back."""
        if not self._may_be_scaled and not self.follows_schedule:
            return
        made = self._num_steps()
        self._first_step = min(self._first_step, made)
        self._warmup.notice_fewer_steps(made)
        self._user_steps.notice_fewer_steps(made)

    def anchors(self) -> list[tf.Variable]:
        """Returns what depends on the optimizer's steps, which are rank 0's on all ranks when a `fit` begins."""
        return [self._warmup.origin, self._user_steps.known] if self._may_be_scaled or self.follows_schedule else []

    def set_warmup(self, steps: float) -> None:
        """Sets the length of the warm-up, in steps from the origin."""
        self._warmup.set_length(steps, self._num_steps())

    def continue_warmup(self) -> None:
        """Continues a resumed warm-up with its length, where that of an epoch is not known yet."""
        self._warmup.continue_resumed(self._num_steps())

    def effective(self) -> float:
        """Returns the rate that the next update uses."""
        return float(self.current())

    @property
    def is_used(self) -> bool:
        """Whether the optimizer has made a step with this rate: a model may hold one that it never calls."""
        return self._num_steps() > self._first_step

    def report(self, why_unchanged: str = "") -> None:
        """Logs the rate; see `EffectiveRates.report`."""
        name, rule, stretch = type(self.optimizer).__name__, self.rule, self._user_steps.stretch
        is_of_a_file = self._first_step > 0 and not self._is_resumed
        if self.follows_schedule and stretch != 1.0 and is_of_a_file and not self._is_told_of_steps:
            self._is_told_of_steps = True
            logger.warning(
                f"the learning rate's schedule goes on from steps that this job has not made. Received: a {name} with "
                f"{self._num_steps():.0f} steps, as from a file, each of which counts as {stretch:g} of "
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
        once.info(f"learning rate of {name}: {scaled} by the {rule.name} rule, {self._warmup.description}")
        once.debug(f"learning rate of {name}: {rule.why}; settings that count batches (save_freq, EMA, ...) stay")

    # The state of a resumed training.

    def progress(self) -> dict[str, Any]:
        """Returns the state of the warm-up and of the user's schedule, as JSON values."""
        return {
            "factor": self.rule.factor,
            "stretch": self._user_steps.stretch,
            **self._warmup.progress(),
            **self._user_steps.progress(iterations(self.optimizer)),
        }

    def resume(self, progress: dict[str, Any] | None) -> None:
        """Loads what `progress` has returned on any number of ranks, after the optimizer's iterations are loaded."""
        made, self._is_resumed = self._num_steps(), True
        self.agreed.set_to_stored()
        now = [self.rule.factor, self._user_steps.stretch]
        if progress is not None and [progress["factor"], progress["stretch"]] == now:
            self._warmup.load(progress)
            self._user_steps.set_known(*progress["steps_made"])
            return
        self._user_steps.set_known(made, made if progress is None else progress["user_steps"])
        self._warmup.resume(progress, made, self._user_steps.stretch)

    # The methods of `RateScale`, which updates read.

    def scaled(self, rate: Callable[[], Any]) -> tf.Tensor:
        """Returns the rate of the next update: the user's, at the user's step, times the multiplier."""
        return self.current() if self._may_be_scaled or self.follows_schedule else rate()

    def momentum_ratio(self) -> tf.Tensor | None:
        """Returns the multiplier divided by the last step's, a `float32` scalar; `None` if nothing is scaled."""
        if not self._may_be_scaled:
            return None
        now = tf.convert_to_tensor(iterations(self.optimizer))
        return self._warmup.multiplier(now) / self._warmup.multiplier(now - 1)

    @property
    def follows_schedule(self) -> bool:
        """Whether the user's rate is a `LearningRateSchedule`."""
        return isinstance(stored_learning_rate(self.optimizer), keras.optimizers.schedules.LearningRateSchedule)

    def current(self) -> tf.Tensor:
        """Returns the rate that the next update uses, a scalar tensor."""
        rate = tf.convert_to_tensor(self._user_rate())
        return rate * tf.cast(self._warmup.multiplier(iterations(self.optimizer)), rate.dtype)

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
        self._user_steps.set_known(now, self._user_steps.at(before) + now - before)

    def _user_rate(self) -> Any:
        rate = stored_learning_rate(self.optimizer)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            step = iterations(self.optimizer)
            # Not a step too early where the quotient of batches and steps is rounded down.
            return rate(tf.cast(self._user_steps.at(step) + 1e-6, step.dtype))
        return current_learning_rate(self.optimizer)

    def _num_steps(self) -> float:
        return number_of(iterations(self.optimizer))
