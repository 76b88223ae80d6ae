"""Messages between two ranks over TensorFlow's collective ops: a sum of what is sent and of the receiver's zeros."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Sequence

import tensorflow as tf

from kdist.engines.lanes import GroupKeys, Lane


class Messages:
    """The messages of one rank to and from the others of its engine, with a lane for each pair and direction.

    Args:
        keys: `GroupKeys` of the engine.
        rank: int, this rank in the engine.
        world_ranks: sequence of ints, the ranks of the engine as ranks of the job.
        timeout: float, the seconds that a message may take; 0 for no limit.
    """

    def __init__(self, keys: GroupKeys, rank: int, world_ranks: Sequence[int], timeout: float) -> None:
        self._keys = keys
        self._rank = rank
        self._world_ranks = world_ranks
        self._timeout = timeout
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._queues: dict[int, queue.SimpleQueue[tf.Tensor]] = {}
        self._failure: Exception | None = None

    def send(self, words: tf.Tensor, to: int) -> tf.Tensor:
        """Sends a 1-D tensor of `int32`; returns a tensor that is there when it is received."""
        return self._lane(self._rank, to).reduce(words)

    def send_in_background(self, words: tf.Tensor, to: int) -> None:
        """Sends eagerly, in a thread, after what was sent to that rank before; raises the error of an earlier send."""
        if self._failure is not None:
            raise self._failure
        if to not in self._queues:
            self._queues[to] = queue.SimpleQueue()
            # A daemon: at the end of the process all ranks have received what they ever will.
            run = functools.partial(self._send_all, self._queues[to], self._lane(self._rank, to))
            threading.Thread(target=run, name=f"kdist-send-{to}", daemon=True).start()
        self._queues[to].put(words)

    def recv(self, num_words: int, source: int) -> tf.Tensor:
        """Returns the next 1-D tensor of `int32` from a rank, of which the size is known."""
        return self._lane(source, self._rank).reduce(tf.zeros([num_words], tf.int32))

    def _send_all(self, waiting: queue.SimpleQueue[tf.Tensor], lane: Lane) -> None:
        try:
            while True:
                lane.reduce(waiting.get())
        except tf.errors.OpError as error:
            self._failure = error

    def _lane(self, sender: int, receiver: int) -> Lane:
        pair = (sender, receiver)
        if pair not in self._lanes:
            key = self._keys.of_pair((receiver - sender) % len(self._world_ranks), self._world_ranks[sender])
            self._lanes[pair] = Lane.on("CPU:0", "ring", key, 2, self._timeout)
        return self._lanes[pair]
