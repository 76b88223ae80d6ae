"""A gradual beginning for large learning rates."""

from __future__ import annotations

from typing import Any

import keras

from kdist.callbacks.engine_callback import engine_of, refuse_other_strategies
from kdist.callbacks.learning_rate_schedule import LearningRateSchedule
from kdist.engines.engine import Engine
from kdist.errors import StrategyError
from kdist.scaling import warmup_multiplier


class LearningRateWarmup(LearningRateSchedule):
    r"""Lets the learning rate rise from a part of it to all of it over the first epochs.

    The multiplier at epoch $e$, fractional, is $s + (1 - s) \min(1, e / w)$, where $s$ is `start` and $w$ is
    `warmup_epochs`. In `kdist.scope()`, which warms up by itself when it scales the rate, this takes the place of the
    scope's own warm-up.

    It exchanges nothing, but all ranks must have it, or their weights part.

    Args:
        warmup_epochs: float, the epochs after which the whole rate is reached.
        start: float or `None`, the part of the rate that the first step takes. By default 1 over what the scope
            multiplies the rate by; where it does not scale, or without a scope, 1 over the number of ranks.
        momentum_correction: bool, whether SGD's velocities are rescaled when the rate changes.
        steps_per_epoch: int or `None`, the steps of an epoch as the progress bar counts them, where Keras does not know
            them.
        engine: `Engine` or `None`, what knows the number of ranks, where `start` is not given: by default that of the
            model's scope.

    Raises:
        DataError: when training begins, if the number of steps is not known.
        ScopeError: when it gets its model, if there are several ranks, `start` is not given, and nothing says how many.
        StrategyError: if `warmup_epochs` or `start` is out of range.

    Example:
    ```python
    model.compile(keras.optimizers.SGD(0.1 * engine.size, momentum=0.9), ...)
    model.fit(x, y, callbacks=[kdist.callbacks.LearningRateWarmup(5, engine=engine)])
    ```

    References:
    - Goyal et al., [Accurate, Large Minibatch SGD](https://arxiv.org/abs/1706.02677), 2017, section 2.2
    """

    def __init__(
        self,
        warmup_epochs: float = 5.0,
        start: float | None = None,
        *,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        engine: Engine | None = None,
    ) -> None:
        if not warmup_epochs >= 0 or not (start is None or 0 < start <= 1):
            raise StrategyError(
                f"LearningRateWarmup cannot rise like that. Received: warmup_epochs={warmup_epochs}, start={start}. "
                "Expected a number of epochs that is not negative, and a part of the rate above 0, at most 1. "
                "Fix: give these."
            )
        super().__init__(self._rise, momentum_correction=momentum_correction, steps_per_epoch=steps_per_epoch)
        self._given_engine = engine
        self.warmup_epochs = warmup_epochs
        self.start = start
        self._factor = 1.0

    def set_model(self, model: keras.Model) -> None:
        """Finds out from how low the rate rises."""
        super().set_model(model)
        if self.start is not None:
            self._factor = 1.0 / self.start
        else:
            self._factor = float((self._given_engine or engine_of(model, type(self).__name__)).size)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Takes over from the scope's own warm-up."""
        refuse_other_strategies(self.model, type(self).__name__)
        for rate in self._scaled_rates():
            rate.set_warmup(0.0)
            if self.start is None:
                self._factor = rate.rule.factor
        super().on_train_begin(logs)

    def _scaled_rates(self) -> list[Any]:
        replicated = self.model.__dict__.get("_kdist")
        return [] if replicated is None else [rate for rate in replicated.rates() if rate.rule.factor != 1.0]

    def _rise(self, epoch: float) -> float:
        return warmup_multiplier(epoch, self._factor, self.warmup_epochs) / self._factor
