"""TensorFlow's collective ops in sequence: who takes part in one, and by which keys the ranks' ops find each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from kdist.engines.tensors import flat
from kdist.engines.tensors.unlifted import unlifted_variable

LANES = 8
"""How many collectives of an engine may run at once."""

_CODES = {tf.float32: 0, tf.float64: 1, tf.int32: 2, tf.int64: 3}
_GATHERS = 4  # added to the dtype's code
_ROWS = 8  # of int32 only
_END = 9  # of the last message, which must not match one of a rank that has not ended yet

_NUM_FIXED = 16  # numbers of an engine's keys that are not for messages between two ranks


class Lane(NamedTuple):
    """A sequence of collectives: each uses the token, and TensorFlow keeps the program order of those that do.

    Attributes:
        group_key: int, by which TensorFlow finds the members: equal on all of them, and used by no others.
        size: int, how many ranks take part.
        device: str, where the ops run.
        hint: str, TensorFlow's implementation: `"ring"` or `"nccl"`.
        timeout: float, the seconds that a collective may take; 0 for no limit.
        token: `tf.Variable`.
    """

    group_key: int
    size: int
    device: str
    hint: str
    timeout: float
    token: tf.Variable

    @classmethod
    def on(cls, device: str, hint: str, group_key: int, size: int, timeout: float) -> Lane:
        """Returns a lane with a token of its own."""
        with tf.init_scope(), tf.device(device):
            token = unlifted_variable(0.0, "kdist_lane")
        return cls(group_key, size, device, hint, timeout, token)

    def reduce(self, tensor: tf.Tensor, *, is_last: bool = False) -> tf.Tensor:
        """Sums a 1-D tensor of `float32`, `float64`, `int32` or `int64`, not empty."""
        code = _END if is_last else _CODES[tensor.dtype]
        total = self._run(tf.raw_ops.CollectiveReduceV2, tensor, code, merge_op="Add", final_op="Id")
        return tf.ensure_shape(total, tensor.shape)

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Gathers 1-D tensors of equal length, not empty, one from each rank, as the rows of a matrix."""
        gathered = self._run(tf.raw_ops.CollectiveGatherV2, tensor, _GATHERS + _CODES[tensor.dtype])
        return tf.reshape(gathered, [self.size, -1])

    def exchange(self, words: tf.Tensor) -> tf.Tensor:
        """Sends row `i` of a tensor of `int32`, not empty, to rank `i`."""
        # As a matrix: of equal keys TensorFlow wants equal shapes.
        exchanged = self._run(tf.raw_ops.CollectiveAllToAllV2, tf.reshape(words, [self.size, -1]), _ROWS)
        return tf.ensure_shape(tf.reshape(exchanged, tf.shape(words)), words.shape)

    def _run(self, op: Callable[..., tf.Tensor], tensor: tf.Tensor, code: int, **attributes: Any) -> tf.Tensor:
        # TensorFlow remembers what was sent under a key, and refuses another dtype or size under the same key.
        key = (10 * tf.cast(flat.size(tensor), tf.int64) + code) % (1 << 31)
        with tf.device(self.device):
            return op(
                input=tensor,
                group_size=self.size,
                group_key=self.group_key,
                instance_key=tf.cast(key, tf.int32),
                ordering_token=[self.token.handle],
                communication_hint=self.hint,
                timeout_seconds=self.timeout,
                **attributes,
            )


class GroupKeys:
    """The group keys of one engine: no other engine in the job has one of them with other members.

    A key is made of a number and of one of its members. Numbers are given out in blocks, one for each engine, that
    grow on each rank, so that those of one member differ. The ranks of an engine have the same block.

    Args:
        world_size: int, the number of ranks of the job.
        first: int, the first number of the block.
    """

    def __init__(self, world_size: int, first: int = 0) -> None:
        self._world_size = world_size
        self._first = first

    def of_lane(self, lane: int, member: int) -> int:
        """Returns the key of a lane with all ranks of the engine; `member` is the first one's rank in the job."""
        return (self._first + 1 + lane) * self._world_size + member

    def of_pair(self, distance: int, sender: int) -> int:
        """Returns the key of messages from one rank, by its rank in the job, to the one `distance` ranks after it."""
        return (self._first + _NUM_FIXED + distance) * self._world_size + sender

    def end(self, size: int) -> int:
        """Returns the first number after the block of an engine of `size` ranks."""
        return self._first + _NUM_FIXED + size
