"""What one rank's callbacks ask of all ranks: it rides in the next step's message, or is agreed on at once."""

from __future__ import annotations

import tensorflow as tf

from kdist.engines.engine import Engine

NAMES = ("stop", "weights", "preempt")


class Requests:
    """What this rank asks for, and what all ranks know that some rank has asked for.

    `"stop"`: end training. `"weights"`: take over the weights that a callback has set on this rank. `"preempt"`: save
    and leave.

    Args:
        engine: `Engine`, how the ranks talk to each other.

    Attributes:
        sent: `float32` variable of shape `(3,)`, what rides in the next message: 1 for each name that is asked for.
        granted: set of str, what has arrived on all ranks alike.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wanted: set[str] = set()
        self._sent: set[str] = set()
        self.granted: set[str] = set()
        with tf.init_scope():
            self.sent = tf.Variable([0.0] * len(NAMES), trainable=False, name="kdist_requests")

    def ask(self, name: str) -> None:
        """Asks for something: no message, no tensor, so that a signal handler may do it."""
        self._wanted.add(name)

    def asks(self, name: str) -> bool:
        """Returns whether this rank has asked for something that is not withdrawn."""
        return name in self._wanted

    def withdraw(self, *names: str) -> None:
        """Forgets what this rank has asked for, and that it was granted."""
        self._wanted.difference_update(names)
        self.send()
        self.granted.difference_update(names)

    def send(self) -> None:
        """Lets what is asked for ride in the next step's message."""
        if self._wanted == self._sent:
            return
        self._sent = set(self._wanted)
        self.sent.assign([float(name in self._sent) for name in NAMES])

    def note(self, counts: tf.Tensor) -> None:
        """Notes how many ranks ask, for each name."""
        self.granted.update(name for name, count in zip(NAMES, counts, strict=True) if count > 0)

    def agree(self) -> None:
        """Grants at once what any rank asks for.

        Collective: every rank must call this, in the same order.
        """
        mine = tf.constant([int(name in self._wanted) for name in NAMES], tf.int32)
        (counts,) = self._engine.allreduce([mine])
        self.note(counts.numpy())
