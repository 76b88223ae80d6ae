"""Votes and changed learning rates, as a vector in the step's message."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from kdist.learning_rate.effective_rate import EffectiveRate
from kdist.state.votes import NAMES, Votes
from kdist.step.step import Step


class VoteMessage:
    """One vector of votes and of flags for learning rates that callbacks have changed."""

    def __init__(self, step: Step, votes: Votes) -> None:
        self._step = step
        self._votes = votes

    def vector(self, rates: Sequence[EffectiveRate]) -> tf.Tensor:
        """Returns this rank's term, a `float32` vector: the dtype of most gradients, so that they share a buffer."""
        return tf.concat([self._votes.sent, [rate.agreed.is_changed() for rate in rates]], axis=0)

    def apply(self, counts: tf.Tensor, rates: Sequence[EffectiveRate]) -> None:
        """Applies votes and changes of any rank on all ranks; sends a message only if there are some."""

        def apply() -> None:
            changes = self._step.engine.allreduce([rate.agreed.local_change() for rate in rates]) if rates else []
            for rate, change in zip(rates, changes, strict=True):
                rate.agreed.apply_change(change)
            tf.numpy_function(self._votes.receive, [counts[: len(NAMES)]], [])

        tf.cond(tf.reduce_any(counts > 0), apply, lambda: None)
