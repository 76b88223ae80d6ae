"""The count of the user's steps, at which a schedule of the user's is read."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kdist.keras_hooks.variables import number_of


class UserSteps:
    """How many of the user's steps an optimizer's steps count as: with a larger global batch an epoch has fewer.

    Args:
        stretch: float, the user's steps in one step.

    Attributes:
        known: `tf.Variable` of two numbers, a step of this job and the user's step there, which another job may have
            reached.
    """

    def __init__(self, stretch: float) -> None:
        self._stretch = tf.Variable(stretch, dtype=tf.float64, trainable=False, name="kdist_stretch")
        self.known = tf.Variable([0.0, 0.0], dtype=tf.float64, trainable=False, name="kdist_steps_made")

    @property
    def stretch(self) -> float:
        """The user's steps in one step."""
        return number_of(self._stretch)

    def at(self, step: Any) -> Any:
        """Returns the user's step at a step, a `float64` scalar."""
        known, user_step = self.known[0], self.known[1]
        return user_step + (tf.cast(tf.convert_to_tensor(step), tf.float64) - known) * self._stretch

    def set_stretch(self, stretch: float) -> None:
        """Sets the user's steps in one step, from the known step on."""
        self._stretch.assign(stretch)

    def set_known(self, step: Any, user_step: Any) -> None:
        """Sets the user's step at a step."""
        self.known.assign(tf.convert_to_tensor([step, user_step], tf.float64))

    def notice_fewer_steps(self, made: float) -> None:
        """Begins again if the script has set the count of steps back to before the known one."""
        if made < number_of(self.known[0]):
            self.set_known(0.0, 0.0)

    def progress(self, step: Any) -> dict[str, Any]:
        """Returns the state at a step, as JSON values."""
        known = tf.convert_to_tensor(self.known).numpy().tolist()
        return {"steps_made": known, "user_steps": float(self.at(step))}
