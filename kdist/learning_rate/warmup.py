"""The gradual warm-up of a learning rate, as a multiplier of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from kdist.keras_hooks.variables import number_of


class Warmup:
    """A multiplier that rises from 1 to a factor, from an origin on: both are counted in the optimizer's steps.

    Args:
        factor: float, the multiplier after the warm-up.
        made: float, the steps that the optimizer has made.

    Attributes:
        origin: `tf.Variable`, the steps that the optimizer had made when the warm-up began.
    """

    def __init__(self, factor: float, made: float) -> None:
        self._resumed: tuple[float, float] | None = None  # the fraction made, and the length in steps
        # Variables, so that a second `fit` changes them without another trace.
        self._factor = tf.Variable(factor, dtype=tf.float32, trainable=False, name="kdist_factor")
        # Infinite: not known yet.
        self._length = tf.Variable(float("inf"), dtype=tf.float32, trainable=False, name="kdist_warmup_steps")
        self.origin = tf.Variable(made, dtype=tf.float64, trainable=False, name="kdist_origin")

    @property
    def is_known(self) -> bool:
        """Whether its length is known."""
        return bool(tf.math.is_finite(self._length))

    @property
    def is_resumed(self) -> bool:
        """Whether it continues that of another job, as soon as its length is known."""
        return self._resumed is not None

    @property
    def description(self) -> str:
        """A description, for the log."""
        if not self.is_known:
            return "after a warm-up that begins after the first epoch, when the steps of an epoch are known"
        steps = math.ceil(number_of(self._length))
        return f"after a warm-up of {steps} step{'s' * (steps != 1)}" if steps else "at once"

    def multiplier(self, step: Any) -> tf.Tensor:
        """Returns the multiplier at a number of steps, a `float32` scalar (see `scaling.warmup_multiplier`)."""
        step = tf.cast(tf.cast(tf.convert_to_tensor(step), tf.float64) - self.origin, tf.float32)
        share = tf.where(self._length > 0, tf.math.divide_no_nan(step, self._length), 1.0)
        return 1.0 + (self._factor - 1.0) * tf.clip_by_value(share, 0.0, 1.0)

    def set_factor(self, factor: float) -> None:
        """Sets the multiplier after the warm-up."""
        self._factor.assign(factor)

    def set_length(self, length: float, made: float) -> None:
        """Sets the length, in steps from the origin; `made` are the optimizer's steps."""
        if self._resumed is not None:  # the same fraction of the new warm-up
            self.origin.assign(made - self._resumed[0] * length)
            self._resumed = None
        elif not self.is_known:  # nothing was scaled so far
            self.origin.assign(made)
        self._length.assign(length)

    def continue_resumed(self, made: float) -> None:
        """Continues a resumed warm-up with its length, where that of an epoch is not known yet."""
        if self._resumed is not None:
            self.set_length(self._resumed[1], made)

    def notice_fewer_steps(self, made: float) -> None:
        """Ends the warm-up if the script has set the count of steps back to before it."""
        if self.is_known and made < number_of(self.origin):
            self.origin.assign(made - number_of(self._length))

    def progress(self) -> dict[str, Any]:
        """Returns the state, as JSON values."""
        return {"origin": number_of(self.origin), "warmup_steps": number_of(self._length) if self.is_known else None}

    def load(self, progress: Mapping[str, Any]) -> None:
        """Loads what `progress` has returned, with the same factor and steps of the same size."""
        self.origin.assign(progress["origin"])
        if progress["warmup_steps"] is not None:
            self._length.assign(progress["warmup_steps"])

    def resume(self, progress: Mapping[str, Any] | None, made: float, stretch: float) -> None:
        """Loads what `progress` has returned, with another factor, or steps of another size.

        Args:
            progress: mapping, with the `stretch` of then; or `None` to begin now.
            made: float, the optimizer's steps.
            stretch: float, the user's steps in one step.
        """
        length = None if progress is None else progress["warmup_steps"]
        if progress is None or length is None:
            self.origin.assign(made if progress is None else progress["origin"])
            return
        share = min(1.0, (made - progress["origin"]) / length) if length else 1.0
        self._resumed = share, length * progress["stretch"] / stretch
        if self.is_known:
            self.set_length(number_of(self._length), made)
