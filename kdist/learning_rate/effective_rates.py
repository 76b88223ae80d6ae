"""The effective learning rates of a model's optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from kdist.errors import StrategyError
from kdist.keras_hooks.optimizers import innermost, optimizers_of
from kdist.learning_rate.effective_rate import EffectiveRate
from kdist.scaling import LearningRateRule, learning_rate_rule, num_warmup_steps
from kdist.state.part import State, StatePart


class EffectiveRates(StatePart):
    """The effective rates of a model's optimizers, made on first use."""

    name = "rates"

    def __init__(self, model: keras.Model, *, scale_lr: str | float | None, batches_per_step: int) -> None:
        self._model = model
        self._scale_lr = scale_lr
        self._batches_per_step = batches_per_step
        self._rates: dict[int, EffectiveRate] = {}
        self._in_steps: tuple[int, float] = batches_per_step, 1.0  # what is not a step of `fit` counts once

    def get(self, optimizer: keras.optimizers.Optimizer) -> EffectiveRate:
        """Returns the effective rate of an innermost optimizer; a `MultiOptimizer` with a factor is an error."""
        rate = self._rates.get(id(optimizer))
        if rate is None or rate.optimizer is not optimizer:
            if hasattr(optimizer, "optimizers") and self._scale_lr not in ("auto", None, 1.0):
                raise StrategyError(
                    f"scale_lr cannot scale a MultiOptimizer. Received: scale_lr={self._scale_lr!r}, a MultiOptimizer "
                    "with a learning rate for each part. Expected 'auto' or None, which do not scale. Fix: set the "
                    "parts' learning rates, and scale_lr=None."
                )
            rule = self._rule(optimizer, self._batches_per_step)
            held = {id(innermost(each)) for each in optimizers_of(self._model)}
            # Without those of an earlier compile.
            self._rates = {key: rate for key, rate in self._rates.items() if key in held}
            with tf.init_scope():
                rate = self._rates[id(optimizer)] = EffectiveRate(optimizer, rule)
                self._set_data(rate)
        return rate

    def _rule(self, optimizer: keras.optimizers.Optimizer, batches_in_step: int) -> LearningRateRule:
        return learning_rate_rule(self._scale_lr, type(optimizer).__name__, batches_in_step)

    def _set_data(self, rate: EffectiveRate) -> None:
        most, mean = self._in_steps
        # With a larger global batch an epoch has fewer steps: a schedule has to cover the same epochs.
        rate.set_data(self._rule(rate.optimizer, most), 1.0 if self._scale_lr is None else float(mean))

    def set_data(self, batches_in_steps: tuple[int, float] | None) -> None:
        """Sets what the rates need to know of the data of a `fit`.

        Args:
            batches_in_steps: pair of the most of the user's batches in a step, fewer than usual where an epoch has
                fewer, and of their mean; or `None` if an epoch's length is unknown.
        """
        self._in_steps = batches_in_steps or (self._batches_per_step, self._batches_per_step)
        for rate in self.all():
            self._set_data(rate)

    def notice_fewer_steps(self) -> None:
        """Notices that a callback has set the count of an optimizer's steps back, on all ranks."""
        for rate in self._rates.values():  # one that is made later counts from then
            rate.notice_fewer_steps()

    @contextlib.contextmanager
    def keeping_data(self) -> Iterator[None]:
        """A context for a `fit` within a `fit`, whose data is another one's."""
        before = self._in_steps
        try:
            yield
        finally:
            self.set_data(before)

    def set_warmup(self, warmup_epochs: str | float, params: Mapping[str, Any], steps_per_epoch: int | None) -> None:
        """Sets the length of each warm-up that has none, if the steps of an epoch are known or not needed."""
        if steps_per_epoch is None and warmup_epochs:
            for rate in self.all():
                rate.continue_warmup()
            return
        steps = num_warmup_steps(warmup_epochs, params.get("epochs", 1), steps_per_epoch or 0)
        for rate in self.all():
            if not rate.warmup_is_known and rate.may_warm_up:
                rate.set_warmup(steps)

    def add_to_logs(self, logs: dict[str, Any] | None) -> None:
        """Adds `effective_learning_rate` to an epoch's logs where it differs from the user's."""
        used = self.used()
        if logs is None:
            return
        if len(used) == 1:
            used[0].is_logged_alone = True
        for rate in used:
            if rate.is_scaled:
                logs[rate.log_key] = rate.effective()

    def used(self) -> list[EffectiveRate]:
        """Returns the rate of the only optimizer, or of those that have made a step."""
        rates = self.all()
        return rates if len(rates) == 1 else [rate for rate in rates if rate.is_used]

    def report(self, why_unchanged: str = "") -> None:
        """Logs once for each rate in use: the old one, the new one, the rule and its reason."""
        for rate in self.used():
            if not rate.is_reported:
                rate.is_reported = True
                rate.report(why_unchanged)

    def state_dict(self) -> State:
        """Returns the progress of each optimizer's warm-up and schedule."""
        return {"rates": [rate.progress() for rate in self.all()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes warm-ups and schedules at the user's step."""
        saved = state.get("rates", [])
        for place, rate in enumerate(self.all()):
            rate.resume(saved[place] if place < len(saved) else None)

    def all(self) -> list[EffectiveRate]:
        """Returns the rates of all optimizers of the model."""
        return [self.get(innermost(optimizer)) for optimizer in optimizers_of(self._model)]
