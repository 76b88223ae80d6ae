"""A multiplier of the learning rate that follows the epochs."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.callbacks.engine_callback import refuse_other_strategies
from kdist.errors import DataError, ScopeError
from kdist.training import replay
from kdist.training.learning_rate import correct_momentum
from kdist.training.optimizers import innermost, optimizers_of
from kdist.training.step_wrappers import replaced, step_wrappers


class LearningRateSchedule(keras.callbacks.Callback):
    """Multiplies the learning rate by a function of the epoch.

    The multiplier at each step is a pure function of the position in the training, `epoch + step / steps of an
    epoch`. The steps of an epoch are counted by `optimizer.iterations`, and the epochs are Keras' own: it is right
    with `initial_epoch`, when training is resumed, on another number of ranks too, and with several steps an
    execution. The stored `optimizer.learning_rate`, a number or a `keras.optimizers.schedules.LearningRateSchedule`,
    is never changed: it stays yours, other callbacks may set it, and nothing is multiplied twice. Several of these
    callbacks multiply, and so do they and `kdist.scope(scale_lr=...)`. The rate in use is in the epoch's logs as
    `effective_learning_rate`.

    It exchanges nothing, but all ranks must have it, or their weights part.

    Args:
        multiplier: callable that takes the epoch, a float from 0 and fractional within an epoch, and returns the
            multiplier; or a mapping from epochs, fractional ones too, to the multiplier that holds from there on.
            Before the first of them it is 1.
        momentum_correction: bool, whether SGD's velocities are rescaled when the rate changes.
        steps_per_epoch: int or `None`, the steps of an epoch as the progress bar counts them, where Keras does not know
            them: generators, datasets of unknown length.

    Attributes:
        is_collective: bool, whether `fit` compares over the ranks that all of them were given this callback.

    Raises:
        DataError: when training begins, if the number of steps is not known.
        ScopeError: when training begins, if the optimizer is a `MultiOptimizer`, or a step is not one replica's of this
            process.

    Example:
    ```python
    kdist.callbacks.LearningRateSchedule({30: 0.1, 60: 0.01, 80: 0.001})
    kdist.callbacks.LearningRateSchedule(lambda epoch: 0.97**epoch)
    ```

    References:
    - Goyal et al., [Accurate, Large Minibatch SGD](https://arxiv.org/abs/1706.02677), 2017, section 2.1
    """

    is_collective = True
    reads_state_between_steps = False

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
        with tf.init_scope():
            # The multipliers of an epoch, from the step before its first one: values are read in the graph.
            self._table = tf.Variable([1.0], shape=[None], dtype=tf.float64, trainable=False, name="kdist_multipliers")
            self._start = tf.Variable(0, dtype=tf.int64, trainable=False, name="kdist_multipliers_start")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the multiplier between the optimizer and its rate."""
        refuse_other_strategies(self.model, type(self).__name__)
        if any(hasattr(innermost(each), "optimizers") for each in optimizers_of(self.model)):
            raise ScopeError(
                f"{type(self).__name__} follows one learning rate. Received: a MultiOptimizer, which has one for each "
                "of its parts. Expected another optimizer. Fix: give the parts schedules of Keras'."
            )
        if self._num_steps() is None:
            raise DataError(
                f"{type(self).__name__} follows fractions of an epoch. Received: data of unknown length. Expected the "
                "number of steps of an epoch. Fix: give fit or this callback `steps_per_epoch`."
            )
        step_wrappers(self.model).put(self._around_step)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch."""
        self._epoch, self._is_filled = epoch, False

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Fills the table of the epoch, at the first batch that is trained on: a resumed epoch may begin later."""
        if self._is_filled or replay.is_passing_over(self.model):
            return
        self._is_filled = True
        num_steps = self._num_steps() or 1
        epochs = (self._epoch + step / num_steps for step in range(-1, num_steps))
        # Not `iterations`, which counts updates: of several steps, where gradients are accumulated.
        self._start.assign(int(innermost(optimizers_of(self.model)[0])._iterations) - batch - 1)
        self._table.assign(np.array([self.multiplier(max(0.0, epoch)) for epoch in epochs]))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the rate in use to the logs."""
        if logs is not None:
            optimizer = innermost(optimizers_of(self.model)[0])
            rate = logs.get("effective_learning_rate", float(optimizer.learning_rate))
            logs["effective_learning_rate"] = rate * float(self.at(optimizer._iterations))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Takes the multiplier away."""
        step_wrappers(self.model).take_off(self._around_step)

    def at(self, iterations: Any) -> tf.Tensor:
        """Returns the multiplier at a number of iterations of the epoch that runs, a `float64` scalar."""
        place = tf.cast(tf.convert_to_tensor(iterations), tf.int64) - self._start
        return tf.gather(self._table, tf.clip_by_value(place, 0, tf.size(self._table, tf.int64) - 1))

    def _num_steps(self) -> int | None:
        return self.steps_per_epoch or self.params.get("steps")

    def _around_step(self, step: Callable[[Any], Any], data: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for optimizer in optimizers_of(self.model):
                stack.enter_context(self._multiplied(innermost(optimizer)))
            return step(data)

    @contextlib.contextmanager
    def _multiplied(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        """Makes an optimizer's updates take the multiplied rate while a step is traced."""
        apply = optimizer.apply

        def multiply_and_apply(*args: Any, **kwargs: Any) -> Any:
            now = tf.convert_to_tensor(optimizer._iterations)
            multiplier, last = self.at(now), self.at(now - 1)
            if self.momentum_correction:
                correct_momentum(optimizer, tf.where(last > 0, tf.math.divide_no_nan(multiplier, last), 1.0))
            rate = optimizer._get_current_learning_rate

            def multiplied() -> Any:
                value = tf.convert_to_tensor(rate())
                return value * tf.cast(multiplier, value.dtype)

            with replaced(optimizer, "_get_current_learning_rate", multiplied):
                return apply(*args, **kwargs)

        with replaced(optimizer, "apply", multiply_and_apply):
            yield


def piecewise(multipliers: Mapping[float, float]) -> Callable[[float], float]:
    """Returns the function of the epoch that takes each multiplier from its epoch on, and 1 before the first.

    Args:
        multipliers: mapping from epochs to multipliers.

    Example:
    >>> piecewise({30: 0.1, 60: 0.01})(45.5)
    0.1
    """
    epochs = sorted(multipliers)

    def multiplier(epoch: float) -> float:
        # A step is counted to the epoch where it begins, up to rounding of fractions.
        place = bisect.bisect_right(epochs, epoch + 1e-9)
        return float(multipliers[epochs[place - 1]]) if place else 1.0

    return multiplier
