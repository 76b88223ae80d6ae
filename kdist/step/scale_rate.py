"""The stages that scale the learning rate of an update, or leave it the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from kdist.keras_hooks.optimizers import innermost
from kdist.learning_rate.effective_rate import EffectiveRate
from kdist.learning_rate.rate_scale import RateScale, scaled_rate
from kdist.step.update import Stage, Update


class ScaleRate(Stage):
    """Scales the rate of each update."""

    phase = "scale rate"

    def __init__(self, scale_of: Callable[[keras.optimizers.Optimizer], RateScale | None]) -> None:
        self._scale_of = scale_of

    def __call__(self, update: Update, proceed: Callable[[], Any]) -> Any:
        """Runs the update with the scaled rate."""
        optimizer = innermost(update.optimizer)
        scale = self._scale_of(optimizer)
        if scale is None:
            return proceed()
        with scaled_rate(optimizer, scale):
            return proceed()


class UnscaledRate(Stage):
    """The stage of an update on one of the user's batches, as in `train_on_batch`: the rate is the user's."""

    phase = "scale rate"

    def __init__(self, rate_of: Callable[[keras.optimizers.Optimizer], EffectiveRate]) -> None:
        self._rate_of = rate_of

    def __call__(self, update: Update, proceed: Callable[[], Any]) -> Any:
        """Runs the update with the user's rate."""
        with self._rate_of(innermost(update.optimizer)).unscaled():
            return proceed()
