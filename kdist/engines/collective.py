"""Collectives by TensorFlow's own ops, over its gRPC cluster: no MPI, no Horovod."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import tensorflow as tf

from kdist._tf_internals import abort_collectives
from kdist.engines import arguments, flat, fusion, rendezvous, slices
from kdist.engines.engine import Engine
from kdist.engines.in_turn import InTurn
from kdist.engines.progress import Progress
from kdist.engines.shared_memory import FAILURE, SharedMemory
from kdist.errors import EngineError

_LOG = logging.getLogger("kdist")

LANES = 8
"""How many collectives may be under way at once."""

_SHARED_BYTES = 1 << 16
"""From which size on sums go through memory that all ranks share, where there is such: it takes Python in the graph."""

_LAST_WORDS = 0.1  # seconds that a rank stays after the last collective, whose answers may not have left yet
_CODES = {tf.float32: 0, tf.float64: 1, tf.int32: 2, tf.int64: 3}
_GATHERS = 4  # added to the dtype's code
_ROWS = 8  # of int32 alone
_END = 9  # of the last message, which must not pass for one of a rank that still has something to say
_REFUSED = "kdist refuses this collective"


class _Lane(NamedTuple):
    """Where collectives run one after the other: each takes the token, and TensorFlow keeps their order."""

    group: int
    device: str
    hint: str
    token: tf.Variable


class CollectiveEngine(Engine):
    """Collectives over a TensorFlow cluster of one task a rank: rings on CPUs, NCCL among GPUs.

    Large messages travel as pieces in several lanes at once. TensorFlow finds the ops of all ranks that belong
    together by two keys; both follow from what is sent (the lane; the dtype and the number of elements), so that a
    rank which traces a function more often than the others still has the same. Two collectives with equal keys are in
    one lane, hence never under way at once. Ranks that disagree about shapes, dtypes or the order of calls wait for
    each other, until `timeout`.

    TensorFlow cannot leave a cluster or join another one: there can be one of these in a process, and once a
    collective has failed, all later ones fail. A process that ends waits until all ranks have ended.

    Args:
        addresses: sequence of str, `"host:port"` of each rank, in rank order. Every rank listens at its own port, on
            all interfaces, and trusts who connects: these ports belong in a private network.
        rank: int, this process's number.
        start_timeout: float, seconds in which all ranks must have appeared.
        timeout: float or `None`, seconds that a collective may take, waiting for the other ranks included; `None`
            for no limit. A rank that has died is noticed without it, at once.
        abort: function of an exit code that ends all ranks, where a launcher offers one; by default the others notice
            that this one has ended.
        share_memory: bool, whether large sums of ranks that are on one host go through memory that they share, which is
            several times faster than any network.

    Raises:
        EngineError: if the server does not start, TensorFlow was used before, or a rank does not appear in time.

    Example:
    >>> engine = CollectiveEngine(["node0:2222", "node1:2222"], rank=0)  # doctest: +SKIP
    >>> [total] = engine.allreduce([tf.constant([1.0, 2.0])])  # doctest: +SKIP
    """

    name = "collective"

    def __init__(
        self,
        addresses: Sequence[str],
        rank: int,
        *,
        start_timeout: float = 600.0,
        timeout: float | None = None,
        abort: Callable[[int], NoReturn] | None = None,
        share_memory: bool = True,
    ) -> None:
        self.addresses = tuple(addresses)
        self.rank = rank
        self.size = len(addresses)
        neighbours = [each for each in addresses if rendezvous.host(each) == rendezvous.host(addresses[rank])]
        self.local_rank = neighbours.index(addresses[rank])
        self.local_size = len(neighbours)
        self._one_at_a_time = threading.Lock()
        self._abort = abort
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._timeout = start_timeout  # for the first collective: a port may be open and nobody there
        rendezvous.start(self.addresses, rank)
        rendezvous.wait_for_all(self.addresses, rank, start_timeout)
        with tf.device("CPU:0"):
            tokens = [tf.Variable(0.0, trainable=False, name="kdist_lane") for _ in range(LANES)]
            self._is_refusing = tf.Variable(False, trainable=False, name="kdist_refusing")
        self._progress = Progress()
        self.activity.of_graphs = self._progress.look
        self._lanes = [_Lane(1 + number, "CPU:0", "ring", token) for number, token in enumerate(tokens)]
        self._gpu_lane: _Lane | None = None
        places = self.gather_objects(_place(addresses[rank]))
        if _each_has_a_gpu(places):
            with tf.device("GPU:0"):
                self._gpu_lane = _Lane(1 + LANES, "GPU:0", "nccl", tf.Variable(0.0, trainable=False))
        elif rank == 0 and any(len(place) > 2 for place in places):
            _LOG.warning(
                "gradients travel through the hosts' memory, not over NCCL: that takes a GPU for each rank, told from "
                "the others by host, CUDA_VISIBLE_DEVICES and name. Received: %s. Fix: one rank a GPU, each shown all "
                "of its host's (`srun --gpus-per-node=4 --gpu-bind=none`): kdist takes one by local rank.",
                places,
            )
        self._timeout = timeout or 0.0
        self._in_turn = InTurn("kdist_collective_order")
        self._memory: SharedMemory | None = None
        if share_memory and self.size > 1 and self.local_size == self.size and self._gpu_lane is None:
            self._memory = SharedMemory.open(rank, self.size, self.gather_objects, timeout)
        if self.size > 1:
            # One each is enough: a rank whose collectives are aborted fails those of the others.
            after = (rank + 1) % self.size
            rendezvous.watch(addresses[after], lambda: abort_collectives(f"rank {after} at {addresses[after]} is gone"))
        atexit.register(self._wait_for_the_others)

    def allreduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sums in pieces, several at once; see `Engine.allreduce`."""
        tensors = arguments.for_allreduce(tensors)
        dense, parts = slices.apart(tensors)
        with self._exchange("allreduce", dense, parts) as finished:
            sums, gathered = self._sum_tensors(dense), self._gather_tensors(parts)
            finished([*sums, *gathered])
        return slices.together(tensors, sums, gathered)

    def allgather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gathers the lengths, then all tensors in one message; see `Engine.allgather`."""
        tensors = arguments.for_allgather(tensors)
        with self._exchange("allgather", (), tensors) as finished:
            gathered = self._gather_tensors(tensors)
            finished(gathered)
        return gathered

    def alltoall(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends all tensors' rows as words, in one operation; see `Engine.alltoall`."""
        tensors = arguments.for_alltoall(tensors, self.size)
        if not tensors:
            return []
        rows = flat.rows_to_bytes(tensors)
        num_words = -(-rows.shape[1] // 4)
        # One word at least: TensorFlow cannot send nothing.
        filled = tf.pad(rows, [[0, 0], [0, 4 * max(num_words, 1) - rows.shape[1]]])
        words = tf.bitcast(tf.reshape(filled, [self.size, -1, 4]), tf.int32)
        with self._exchange("alltoall", tensors) as finished:
            received = tf.ensure_shape(
                self._run(tf.raw_ops.CollectiveAllToAllV2, words, self._lanes[0], _ROWS), words.shape
            )
            finished([received])
        return flat.rows_from_bytes(flat.from_words(received)[:, : rows.shape[1]], tensors)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        """Sums the root's bytes and the other ranks' zeros; see `Engine.broadcast`."""
        tensors = arguments.for_broadcast(tensors, root, self.size)
        if not tensors:
            return []
        parts = [flat.to_bytes(tensor) for tensor in tensors]
        sizes = [flat.size(part) for part in parts]
        mine = tf.concat(parts, 0)
        words = flat.to_words(mine, -(-flat.size(mine) // 4))
        with self._exchange("broadcast", tensors) as finished:
            (words,) = self._sum([words if self.rank == root else tf.zeros_like(words)])
            finished([words])
        parts = flat.split(flat.from_words(words)[: flat.size(mine)], sizes)
        return [
            flat.shaped(flat.from_bytes(part, tensor.dtype), tensor)
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    def barrier(self) -> None:
        """Waits for all ranks, when the graph runs if called in one; see `Engine.barrier`."""
        with self._exchange("barrier") as finished:
            finished(self._sum([tf.zeros([1], tf.int32)]))

    def abort(self, code: int = 1) -> NoReturn:
        """Flushes the standard streams and ends this process, at which the others' collectives fail; see `Engine`."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self._abort is not None:
            self._abort(code)
        os._exit(code)

    @contextlib.contextmanager
    def refusing(self, why: str) -> Iterator[None]:
        """Refuses collectives of graphs that were traced before, too; see `Engine.refusing`."""
        with super().refusing(why):
            with tf.init_scope():
                self._is_refusing.assign(True)
            try:
                yield
            finally:
                with tf.init_scope():
                    self._is_refusing.assign(False)

    def explain(self, error: BaseException) -> EngineError | None:
        """Returns what an error of TensorFlow's collectives means; see `Engine.explain`."""
        text = str(error)
        if _REFUSED in text:
            try:
                self.check_allowed()
            except EngineError as refusal:
                return refusal
        if not isinstance(error, (tf.errors.OpError, EngineError)) or "ollective" not in text:
            return None
        fix = "look for a branch, a shape, a dtype or a number of steps that depends on the rank"
        # Whose end the others learn by the memory that they share may still have its port.
        ended = map(int, re.findall(rf"{FAILURE}rank (\d+) has ended", text))
        if gone := sorted({*ended, *rendezvous.unreachable(self.addresses, self.rank)}):
            what = ", ".join(f"rank {rank} at {self.addresses[rank]}" for rank in gone) + " has ended"
            fix = "look for the reason in what that rank printed"
        elif isinstance(error, tf.errors.DeadlineExceededError):
            what = f"no answer within {self._timeout:g} s"
            fix = f"look for a rank that stands still; {fix}"
        else:
            told = (text.partition(before)[2] for before in (FAILURE, "Collective ops is aborted by: "))
            what = next(filter(None, told), text).strip().partition("\n")[0]
        return EngineError(
            f"A collective failed on rank {self.rank} of {self.size}. Received: {what}. Expected: every rank "
            f"calls the same collectives in the same order, with equal shapes and dtypes. Fix: {fix}."
        )

    @contextlib.contextmanager
    def _exchange(
        self, kind: str, fixed: Sequence[tf.Tensor] = (), free: Sequence[tf.Tensor] = ()
    ) -> Iterator[Callable[[Sequence[tf.Tensor]], None]]:
        """Notes what is sent; gives the function that takes the results, which ends the note.

        Eagerly, one thread at a time, and with an error that says more than TensorFlow's.
        """
        self.check_allowed()
        sent = [*fixed, *free]
        if not tf.executing_eagerly():
            allowed = tf.debugging.Assert(tf.logical_not(self._is_refusing), [_REFUSED])
            with tf.control_dependencies([allowed]):
                begun = self._progress.begin(kind, sent, len(fixed))
            with tf.control_dependencies([begun]):
                yield self._progress.end
            return
        with self._one_at_a_time:
            self.activity.begin(kind, [(each.dtype.name, tuple(each.shape)) for each in sent], len(fixed))
            try:
                yield lambda results: None
            except (tf.errors.OpError, EngineError) as error:
                explained = self.explain(error)
                if explained is None:
                    raise
                raise explained from error
            finally:
                self.activity.end()

    def _sum_tensors(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        sums = self._sum([flat.to_summable(tensor) for tensor in tensors])
        return [flat.from_summable(total, tensor) for total, tensor in zip(sums, tensors, strict=True)]

    def _sum(self, flats: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums 1-D tensors of the four dtypes; small ones share a message."""
        sums = list(flats)
        known = [index for index, each in enumerate(flats) if each.shape.num_elements()]
        for index, total in zip(known, flat.sum_together([flats[i] for i in known], self._sum_buffers), strict=True):
            sums[index] = total
        for index, each in enumerate(flats):
            if each.shape.num_elements() is None:
                sums[index] = self._sum_unknown(each)
        return sums

    def _sum_buffers(self, buffers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums buffers of known size: in shared memory, or in pieces, each in the next lane."""
        count, sums = 0, []
        if self._memory is not None and sum(flat.size(each) * each.dtype.size for each in buffers) >= _SHARED_BYTES:
            return self._sum_in_memory(self._memory, buffers)
        if tf.executing_eagerly() and sum(len(self._cut(buffer)) for buffer in buffers) > 1:
            # As a function, for eagerly one op waits for the other.
            key = tuple((buffer.dtype, flat.size(buffer)) for buffer in buffers)
            if key not in self._functions:
                self._functions[key] = tf.function(self._sum_buffers, autograph=False)
            return list(self._functions[key](list(buffers)))
        for buffer in buffers:
            totals = []
            for start, stop in self._cut(buffer):
                totals.append(self._reduce(buffer[start:stop], self._lane(buffer.dtype, count)))
                count += 1
            sums.append(totals[0] if len(totals) == 1 else tf.concat(totals, 0))
        return sums

    def _sum_in_memory(self, memory: SharedMemory, buffers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        def exchange(*arrays: fusion.Array) -> list[fusion.Array]:
            memory.sum(*arrays)
            return list(arrays)

        if tf.executing_eagerly():
            return [tf.convert_to_tensor(each) for each in exchange(*fusion.pack([*map(flat.to_array, buffers)]))]
        sums = self._in_turn.call(exchange, buffers, num_owned=len(buffers))
        return [tf.ensure_shape(total, buffer.shape) for total, buffer in zip(sums, buffers, strict=True)]

    def _cut(self, buffer: tf.Tensor) -> list[tuple[int, int]]:
        """Returns where the pieces of a buffer begin and end."""
        length = flat.size(buffer)
        if self._lane(buffer.dtype, 0) is self._gpu_lane:
            return [(0, length)]  # NCCL has pieces of its own
        step = fusion.PIECE_BYTES // buffer.dtype.size
        return [(start, min(start + step, length)) for start in range(0, length, step)]

    def _sum_unknown(self, buffer: tf.Tensor) -> tf.Tensor:
        """Sums a buffer whose size is known when the graph runs; nothing is sent if it is empty then."""
        lane = self._lane(buffer.dtype, 0)
        return tf.cond(tf.size(buffer) > 0, lambda: self._reduce(buffer, lane), lambda: tf.identity(buffer))

    def _lane(self, dtype: tf.DType, count: int) -> _Lane:
        if self._gpu_lane is not None and dtype.is_floating:
            return self._gpu_lane
        return self._lanes[count % LANES]

    def _reduce(self, piece: tf.Tensor, lane: _Lane) -> tf.Tensor:
        code = _CODES[piece.dtype]
        return tf.ensure_shape(
            self._run(tf.raw_ops.CollectiveReduceV2, piece, lane, code, merge_op="Add", final_op="Id"), piece.shape
        )

    def _gather(self, mine: tf.Tensor) -> tf.Tensor:
        """Gathers 1-D tensors of equal length, one a rank, as the rows of a matrix."""
        gathered = self._run(tf.raw_ops.CollectiveGatherV2, mine, self._lanes[0], _GATHERS + _CODES[mine.dtype])
        return tf.reshape(gathered, [self.size, -1])

    def _run(self, op: Callable[..., tf.Tensor], tensor: tf.Tensor, lane: _Lane, code: int, **attributes: Any) -> Any:
        # TensorFlow remembers what was sent under a key, and refuses another dtype or size under the same.
        key = (10 * tf.cast(flat.size(tensor), tf.int64) + code) % (1 << 31)
        with tf.device(lane.device):
            return op(
                input=tensor,
                group_size=self.size,
                group_key=lane.group,
                instance_key=tf.cast(key, tf.int32),
                ordering_token=[lane.token.handle],
                communication_hint=lane.hint,
                timeout_seconds=self._timeout,
                **attributes,
            )

    def _gather_tensors(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if not tensors:
            return []
        rows = self._gather(tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in tensors]))
        row_bytes = tf.stack([tf.reduce_prod(tf.shape(tensor, tf.int64)[1:]) * tensor.dtype.size for tensor in tensors])
        sizes = rows * row_bytes
        totals = tf.reduce_sum(sizes, 1)
        mine = tf.concat([flat.to_bytes(tensor) for tensor in tensors], 0)
        # One word at least: TensorFlow crashes when it gathers nothing.
        words = flat.to_words(mine, tf.cast(tf.maximum(-(-tf.reduce_max(totals) // 4), 1), tf.int32))
        received = flat.from_words(self._gather(words))
        by_rank = [
            flat.split(received[rank, : totals[rank]], [sizes[rank, i] for i in range(len(tensors))])
            for rank in range(self.size)
        ]
        counts = tf.reduce_sum(rows, 0)
        return [
            _rows(tf.concat(parts, 0), counts[index], tensors[index])
            for index, parts in enumerate(zip(*by_rank, strict=True))
        ]

    def _wait_for_the_others(self) -> None:
        """Waits until every rank is at its exit: TensorFlow's server ends with its process."""
        # A rank that is gone here has ended before the answer was read, or has died, which its launcher sees.
        with contextlib.suppress(EngineError, tf.errors.OpError):
            with self._exchange("barrier"):
                sums = tf.raw_ops.CollectiveReduceV2
                self._run(sums, tf.zeros([1], tf.int32), self._lanes[0], _END, merge_op="Add", final_op="Id")
            time.sleep(_LAST_WORDS)


def _rows(flat_bytes: tf.Tensor, count: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Returns bytes as so many rows of `like`'s kind."""
    shape = tf.concat([[count], tf.shape(like, tf.int64)[1:]], 0)
    rows = tf.reshape(flat.from_bytes(flat_bytes, like.dtype), shape)
    return rows if like.shape.rank is None else tf.ensure_shape(rows, [None, *like.shape[1:]])


def _place(address: str) -> list[Any]:
    """Returns what tells this process's GPU from those of the others; nothing without one."""
    gpus = [gpu.name for gpu in tf.config.get_visible_devices("GPU")]
    return [rendezvous.host(address), os.environ.get("CUDA_VISIBLE_DEVICES", ""), *gpus]


def _each_has_a_gpu(everyone: Sequence[list[Any]]) -> bool:
    """Returns whether every rank has one GPU, each its own: NCCL refuses to share."""
    return all(len(each) == 3 for each in everyone) and len({tuple(each) for each in everyone}) == len(everyone)
