"""A gradual warm-up of the learning rate."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from kdist.callbacks.engine_callback import engine_of
from kdist.callbacks.learning_rate_schedule import LearningRateSchedule
from kdist.engines.engine import Engine
from kdist.errors import StrategyError
from kdist.state.session import session_of


class LearningRateWarmup(LearningRateSchedule):
    """Increases the learning rate from a fraction of it to the whole over the first epochs.

    The multiplier at epoch `e`, fractions included, is `start + (1 - start) * min(1, e / warmup_epochs)`. In
    `kdist.scope()` it replaces the scope's own warm-up.

    It sends no messages, but all ranks must have it, or their weights differ.

    Args:
        warmup_epochs: float, the epochs after which the whole rate is reached.
        start: float or `None`, the fraction of the rate in the first step. By default 1 divided by the scope's factor
            for the optimizer; without a scope, or if it does not scale, 1 divided by the number of ranks.
        momentum_correction: bool, whether SGD's velocities are rescaled when the rate changes.
        steps_per_epoch: int or `None`, the steps of an epoch in the progress bar, for data of unknown length.
        engine: `Engine` or `None`, whose size is the number of ranks: by default the engine of the model's scope.

    Attributes:
        is_collective: bool, whether `fit` checks that all ranks were given this callback.

    Raises:
        DataError: when training begins, if the number of steps is not known.
        ScopeError: when the model is set, if there are several ranks, no `start` and no engine; when training begins,
            if the optimizer is a `MultiOptimizer`, or this process has several replicas.
        StrategyError: if `warmup_epochs` or `start` is out of range.

    Example:
    ```python
    with kdist.scope():
        model = keras.Sequential([keras.layers.Dense(10)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(x, y, epochs=90, callbacks=[kdist.callbacks.LearningRateWarmup(10)])
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
                f"An argument of LearningRateWarmup is out of range. Received: warmup_epochs={warmup_epochs}, "
                f"start={start}. Expected warmup_epochs of at least 0, and start above 0 and at most 1. Fix: change "
                "it."
            )
        super().__init__(self._share, momentum_correction=momentum_correction, steps_per_epoch=steps_per_epoch)
        self._given_engine = engine
        self.warmup_epochs = warmup_epochs
        self.start = start
        self._start = 1.0
        self._starts: dict[int, float] = {}  # of the optimizers whose rates the scope scales

    def set_model(self, model: keras.Model) -> None:
        """Sets the model and the start."""
        super().set_model(model)
        self._start = self.start or 1.0 / (self._given_engine or engine_of(model, type(self).__name__)).size

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Replaces the scope's own warm-up."""
        scaled = [rate for rate in session_of(self.model).rates() if rate.is_scaled]
        for rate in scaled:
            rate.set_warmup(0.0)
        self._starts = {id(rate.optimizer): self.start or 1.0 / rate.rule.factor for rate in scaled}
        super().on_train_begin(logs)

    def multiplier_now(self, optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
        """Returns an innermost optimizer's multiplier, which begins at its own start."""
        start = self._starts.get(id(optimizer), self._start)
        return start + (1.0 - start) * super().multiplier_now(optimizer)

    def _share(self, epoch: float) -> float:
        return min(1.0, epoch / self.warmup_epochs) if self.warmup_epochs else 1.0
