"""Votes: requests of one rank's callbacks to all ranks, sent in the next step's message or exchanged at once."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.engines.tensors.unlifted import unlifted_variable

NAMES = ("stop", "weights", "preempt")


class Votes:
    """The votes of this rank, and those that all ranks know.

    `"stop"`: end training. `"weights"`: broadcast the weights that a callback has set on this rank. `"preempt"`: save
    and exit.

    Attributes:
        agreed: set of str, the requests of any rank that all ranks know; in one process, the cast votes.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cast: set[str] = set()
        self._sent: set[str] = set()
        self.agreed: set[str] = set()

    @functools.cached_property
    def sent(self) -> tf.Variable:
        """The votes in the next step's message: 1 for each one that is cast, `float32` of shape `(3,)`."""
        with tf.init_scope():
            return unlifted_variable([0.0] * len(NAMES), "kdist_votes")

    def cast(self, name: str) -> None:
        """Casts a vote; without a message or a tensor, so that a signal handler may call this."""
        self._cast.add(name)
        if self._engine.size == 1:
            self.agreed.add(name)

    def is_cast(self, name: str) -> bool:
        """Returns whether this rank has cast a vote and not withdrawn it."""
        return name in self._cast

    def withdraw(self, *names: str) -> None:
        """Withdraws votes, agreed ones too."""
        self._cast.difference_update(names)
        self.send()
        self.agreed.difference_update(names)

    def send(self) -> None:
        """Writes the votes into the next step's message."""
        if self._cast == self._sent:
            return
        self._sent = set(self._cast)
        self.sent.assign(self._vector())

    def receive(self, counts: Iterable[float]) -> None:
        """Receives the number of ranks that have cast each vote."""
        self.agreed.update(name for name, count in zip(NAMES, counts, strict=True) if count > 0)

    def agree(self, others: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
        """Exchanges the votes at once, and returns the sums of other tensors over the ranks, by the same message.

        Collective: every rank must call this, in the same order.
        """
        if not others:
            self.receive(self._engine.sum_numbers(self._vector()))
            return []
        counts, *sums = self._engine.allreduce([tf.cast(self._vector(), others[0].dtype), *others])  # in one buffer
        self.receive(counts.numpy())
        return sums

    def _vector(self) -> list[float]:
        return [float(name in self._cast) for name in NAMES]
