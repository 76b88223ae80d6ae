"""A scale of an optimizer's learning rate, in effect while a context is open; the stored rate stays the user's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
import tensorflow as tf

from kdist.keras_hooks.optimizers import APPLY_GRADIENTS, CURRENT_RATE
from kdist.keras_hooks.patching import patched


class RateScale(Protocol):
    """A scaled learning rate: `EffectiveRate`, and the multiplier of `kdist.callbacks.LearningRateSchedule`."""

    def scaled(self, rate: Callable[[], Any]) -> Any:
        """Returns the rate of an update, given a callable that reads the unscaled one."""
        ...

    def momentum_ratio(self) -> tf.Tensor | None:
        """Returns this step's scale divided by the last step's, a scalar; `None` for no momentum correction."""
        ...


@contextlib.contextmanager
def scaled_rate(optimizer: keras.optimizers.Optimizer, scale: RateScale) -> Iterator[None]:
    """Makes an innermost optimizer use a scaled rate and correct its momentum, while the context is open."""
    rate, apply_gradients = getattr(optimizer, CURRENT_RATE), getattr(optimizer, APPLY_GRADIENTS)

    def corrected(*args: Any, **kwargs: Any) -> Any:
        # Not earlier: a step with gradients that are not finite is skipped before.
        ratio = scale.momentum_ratio()
        if ratio is not None:
            correct_momentum(optimizer, ratio)
        return apply_gradients(*args, **kwargs)

    with patched(optimizer, CURRENT_RATE, lambda: scale.scaled(rate)), patched(optimizer, APPLY_GRADIENTS, corrected):
        yield


def correct_momentum(optimizer: keras.optimizers.Optimizer, ratio: tf.Tensor) -> None:
    r"""Multiplies SGD's velocities by a ratio of learning rates (Goyal et al., 2017, section 3, remark 2).

    Keras' update is $v' = m v - \eta g$, and the paper's $u' = m u + g$ with $v = -\eta u$. Other optimizers are not
    changed.
    """
    momentums = getattr(optimizer, "momentums", None) if isinstance(optimizer, keras.optimizers.SGD) else None
    velocities = [each for each in momentums or () if each is not None]  # the scales of float8 layers have none
    if not velocities:
        return

    def correct() -> None:
        for velocity in velocities:
            velocity.assign(velocity * tf.cast(ratio, velocity.dtype))

    tf.cond(tf.not_equal(ratio, 1.0), correct, lambda: None)
