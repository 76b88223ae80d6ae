"""The engine over TensorFlow's own collective ops and its gRPC cluster: no MPI, no Horovod."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from kdist._tf_internals import abort_collectives
from kdist.cluster.own_output import flush_output
from kdist.engines import cluster_start
from kdist.engines.arrays import fusion
from kdist.engines.arrays.shared_memory import BARRIER, FAILURE, SharedMemory
from kdist.engines.engine import REFUSED, Engine
from kdist.engines.lanes import LANES, GroupKeys, Lane
from kdist.engines.messages import Messages
from kdist.engines.tensors import arguments, flat, slices
from kdist.engines.tensors.ordered_calls import OrderedCalls
from kdist.engines.tensors.progress import Progress
from kdist.engines.tensors.shared_tensors import SharedTensors
from kdist.errors import EngineError

_LOG = logging.getLogger("kdist")

_PORT_CLOSES = 1.0  # seconds in which the port of a process that has ended is closed
_LINGER = 0.1  # seconds that a rank stays after the last collective, whose answers may not have been sent yet


class CollectiveEngine(Engine):
    """Collectives over a TensorFlow cluster of one task a rank: rings on CPUs, NCCL among GPUs.

    Large messages are sent as pieces in several lanes at once. TensorFlow finds the ops of all ranks that belong
    together by two keys; both follow from what is sent (the lane; the dtype and the number of elements), so that a
    rank which traces a function more often than the others still has the same. Two collectives with equal keys are in
    one lane, hence never run at once. Ranks that disagree about shapes, dtypes or the order of calls wait for
    each other, until `timeout`.

    A message from one rank to another is a sum of two: its words, and the receiver's zeros. It has a lane of its own,
    so that it does not wait for other collectives. Eagerly it is sent by a thread.

    TensorFlow cannot leave a cluster or join another one: a process can have one of these and its groups, and once a
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
        share_memory: bool, whether ranks of one host sum, and gather, in memory that they share, which is several
            times faster than any network.

    Raises:
        EngineError: if the server does not start, TensorFlow was used before, or a rank does not appear in time.

    Example:
    >>> engine = CollectiveEngine(["node0:2222", "node1:2222"], rank=0)  # doctest: +SKIP
    >>> [total] = engine.allreduce([tf.constant([1.0, 2.0])])  # doctest: +SKIP
    """

    name = "collective"
    _lanes: list[Lane]
    _progress: Progress

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
        self.rank, self.size = rank, len(addresses)
        self._one_at_a_time = threading.Lock()
        self._abort = abort
        self._share_memory = share_memory
        self._timeout = start_timeout  # of the first collective: a port may be open where no rank is
        cluster_start.start(self.addresses, rank)
        cluster_start.wait_for_all(self.addresses, rank, start_timeout)
        with tf.device("CPU:0"):
            self._is_refusing = tf.Variable(False, trainable=False, name="kdist_refusing")
        self._in_turn = OrderedCalls("kdist_collective_order")
        self._watched: set[int] = set()  # the ranks whose end aborts the collectives; shared with the groups
        self._next_key = [0]  # shared with the groups
        self._open(0)
        self.activity.graph_progress = self._progress.look
        places = self.gather_objects(_place(addresses[rank]))
        self._is_on_gpus = _each_has_a_gpu(places)
        if not self._is_on_gpus and rank == 0 and any(len(place) > 2 for place in places):
            _LOG.warning(
                "gradients are sent through the hosts' memory, not over NCCL: that takes a GPU for each rank, known "
                "by its host, CUDA_VISIBLE_DEVICES and name. Received: %s. Fix: one rank a GPU, each shown "
                "all of its host's (`srun --gpus-per-node=4 --gpu-bind=none`): kdist takes one by local rank.",
                places,
            )
        self._timeout = timeout or 0.0
        self._lanes = [lane._replace(timeout=self._timeout) for lane in self._lanes]
        self._connect()
        atexit.register(self._wait_for_the_others)

    def _join(self, ranks: Sequence[int], members: tuple[int, ...]) -> None:
        first_keys = self.gather_objects(self._next_key[0])  # of all ranks of the engine that is divided
        self._members, self.rank, self.size = members, ranks.index(self.rank), len(ranks)
        self._open(max(first_keys[each] for each in ranks))
        self.activity.group_progress.append((self._progress.look, members))
        self._connect()

    def _open(self, first_key: int) -> None:
        """Makes what collectives of these ranks need; they need not be called together for it."""
        here = [cluster_start.host(self.addresses[each]) for each in self.world_ranks]
        neighbours = [each for each in range(self.size) if here[each] == here[self.rank]]
        self.local_rank, self.local_size = neighbours.index(self.rank), len(neighbours)
        self._keys = GroupKeys(len(self.addresses), first_key)
        self._next_key[0] = self._keys.end(self.size)
        self._lanes = [
            Lane.on("CPU:0", "ring", self._keys.of_lane(number, self.world_ranks[0]), self.size, self._timeout)
            for number in range(LANES)
        ]
        self._gpu_lane: Lane | None = None
        self._shared: SharedTensors | None = None
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._progress = Progress()
        self._progress_of_messages: dict[str, Progress] = {}

    def _connect(self) -> None:
        """Finds the fastest way between these ranks, and notices if one of them ends; all of them call this."""
        self._messages = Messages(self._keys, self.rank, self.world_ranks, self._timeout)
        if self._is_on_gpus:
            key = self._keys.of_lane(LANES, self.world_ranks[0])
            self._gpu_lane = Lane.on("GPU:0", "nccl", key, self.size, self._timeout)
        elif self._share_memory and 1 < self.size == self.local_size:
            gather, timeout = self.gather_objects, self._timeout or None
            memory = SharedMemory.open(self.rank, self.size, gather, timeout, self.world_ranks)
            self._shared = None if memory is None else SharedTensors(memory, self._in_turn)
        # One each is enough: a rank whose collectives are aborted makes those of the others fail.
        after = self.world_ranks[(self.rank + 1) % self.size]
        if self.size > 1 and after not in self._watched:
            self._watched.add(after)
            address = self.addresses[after]
            cluster_start.watch(address, lambda: abort_collectives(f"rank {after} at {address} has ended"))

    def allreduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sums in pieces, several at once; see `Engine.allreduce`."""
        tensors = arguments.for_allreduce(tensors)
        dense, parts = slices.split(tensors)
        with self._exchange("allreduce", dense, parts) as finished:
            sums, gathered = self._sum_tensors(dense), self._gather_tensors(parts)
            finished([*sums, *gathered])
        return slices.merge(tensors, sums, gathered)

    def reduce_scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Exchanges the ranks' parts and adds them; see `Engine.reduce_scatter`."""
        if self._shared is None:
            return super().reduce_scatter(tensors)
        tensors = arguments.for_reduce_scatter(tensors)
        if not tensors:
            return []
        with self._exchange("reduce_scatter", tensors) as finished:
            rows = self._shared.reduce_scatter(tensors)
            finished(rows)
        return rows

    def allgather(
        self, tensors: Sequence[tf.Tensor], lengths: Sequence[Sequence[int]] | None = None
    ) -> list[tf.Tensor]:
        """Gathers the lengths if they are not known, then all tensors in one message; see `Engine.allgather`."""
        tensors = arguments.for_allgather(tensors, lengths, self.rank, self.size)
        with self._exchange("allgather", (), tensors) as finished:
            gathered = self._gather_tensors(tensors, lengths)
            finished(gathered)
        return gathered

    def alltoall(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends all tensors' rows as words, in one operation; see `Engine.alltoall`."""
        tensors = arguments.for_alltoall(tensors, self.size)
        if not tensors:
            return []
        with self._exchange("alltoall", tensors) as finished:
            received = self._lanes[0].exchange(flat.rows_to_words(tensors))
            finished([received])
        return flat.rows_from_words(received, tensors)

    def alltoallv(self, tensors: Sequence[tf.Tensor], counts: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Gathers the counts, then sends to each rank as many rows as the most of them; see `Engine.alltoallv`."""
        tensors, counts = arguments.for_alltoallv(tensors, counts, self.size)
        with self._exchange("alltoallv", [counts], tensors) as finished:
            everyone = self._lanes[0].gather(counts)
            received_counts = tf.ensure_shape(everyone[:, self.rank], [self.size])
            received = []
            if tensors:
                rows = flat.rows_to_words(tensors)
                longest = tf.maximum(tf.reduce_max(everyone), 1)
                padded = tf.RaggedTensor.from_row_lengths(rows, counts).to_tensor(
                    shape=[self.size, longest, rows.shape[1]]
                )
                exchanged = self._lanes[0].exchange(padded)
                rows = tf.RaggedTensor.from_tensor(exchanged, received_counts).flat_values
                received = flat.rows_from_words(tf.ensure_shape(rows, [None, rows.shape[-1]]), tensors)
            finished([received_counts, *received])
        return received, received_counts

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        """Sums the root's bytes and the other ranks' zeros; see `Engine.broadcast`."""
        tensors = arguments.for_broadcast(tensors, root, self.size)
        if not tensors:
            return []
        words = flat.pack_words(tensors)
        with self._exchange("broadcast", tensors) as finished:
            (words,) = self._sum([words if self.rank == root else tf.zeros_like(words)])
            finished([words])
        return flat.unpack_words(words, tensors)

    def send(self, tensors: Sequence[tf.Tensor], to: int) -> None:
        """Sends in a lane of its own; see `Engine.send`."""
        tensors = arguments.for_send(tensors, to, self.rank, self.size)
        if not tensors:
            return
        words = flat.pack_words(tensors)
        if tf.executing_eagerly():
            self.check_allowed()
            with self._explaining():
                self._messages.send_in_background(words, to)
            return
        with self._exchange(f"send to {self.world_ranks[to]}", tensors, peer=to) as finished:
            finished([self._messages.send(words, to)])

    def recv(self, like: Sequence[tf.Tensor | tf.TensorSpec], source: int) -> list[tf.Tensor]:
        """Waits for the message; see `Engine.recv`."""
        specs = arguments.for_recv(like, source, self.rank, self.size)
        if not specs:
            return []
        num_bytes = sum(spec.shape.num_elements() * spec.dtype.size for spec in specs)
        with self._exchange(f"recv from {self.world_ranks[source]}", specs, peer=source) as finished:
            words = self._messages.recv(max(-(-num_bytes // 4), 1), source)
            finished([words])
        return flat.unpack_words(words, specs)

    def barrier(self) -> None:
        """Waits for all ranks, when the graph runs if called in one; see `Engine.barrier`."""
        with self._exchange("barrier") as finished:
            nothing = [tf.zeros([1], tf.int32)]
            finished(self._sum(nothing) if self._shared is None else self._shared.meet(BARRIER, nothing))

    def abort(self, code: int = 1) -> NoReturn:
        """Flushes the standard streams and ends this process, at which the others' collectives fail; see `Engine`."""
        flush_output()
        if self._abort is not None:
            self._abort(code)
        os._exit(code)

    def _refuse_in_graphs(self, refuses: bool) -> None:
        with tf.init_scope():
            self._is_refusing.assign(refuses)

    def explain(self, error: BaseException) -> EngineError | None:
        """Returns what an error of TensorFlow's collectives means; see `Engine.explain`."""
        text = str(error)
        if refusal := self._refusal_in(text):
            return refusal
        is_clear = getattr(error, "is_consequence", False)  # an eager collective has raised what this returns
        if is_clear or not isinstance(error, (tf.errors.OpError, EngineError)) or "ollective" not in text:
            return None
        fix = "look for a branch, a shape, a dtype or a number of steps that depends on the rank"
        # A rank whose end is noticed in shared memory, or by a connection that broke, may still have its port.
        ended = map(int, re.findall(rf"{FAILURE}rank (\d+) has ended", text))
        seconds = _PORT_CLOSES if isinstance(error, tf.errors.UnavailableError) else 0.0
        if dead := sorted({*ended, *cluster_start.unreachable(self.addresses, self.world_ranks[self.rank], seconds)}):
            what = ", ".join(f"rank {rank} at {self.addresses[rank]}" for rank in dead) + " has ended"
            fix = "look for the reason in what that rank printed"
        elif isinstance(error, tf.errors.DeadlineExceededError):
            what = f"no answer within {self._timeout:g} s"
            fix = f"look for a rank that does not run; {fix}"
        else:
            reasons = (text.partition(before)[2] for before in (FAILURE, "Collective ops is aborted by: "))
            what = next(filter(None, reasons), text).strip().partition("\n")[0]
            if what.startswith("no answer"):
                fix = f"look for a rank that does not run; {fix}"
        explained = EngineError(
            f"A collective failed on rank {self.world_ranks[self.rank]} of {len(self.addresses)}. Received: {what}. "
            "Expected: every rank calls the same collectives in the same order, with equal shapes and dtypes. "
            f"Fix: {fix}."
        )
        explained.is_consequence = bool(dead)
        return explained

    @contextlib.contextmanager
    def _exchange(
        self,
        kind: str,
        fixed: Sequence[tf.Tensor | tf.TensorSpec] = (),
        free: Sequence[tf.Tensor] = (),
        peer: int | None = None,
    ) -> Iterator[Callable[[Sequence[tf.Tensor]], None]]:
        """Notes for the failure detector what is sent; yields a function of the results, which ends the note.

        Eagerly, one thread at a time, and with an error that is clearer than TensorFlow's.
        """
        self.check_allowed()
        sent = [*fixed, *free]
        if not tf.executing_eagerly():
            progress = self._progress if peer is None else self._message_progress(kind, peer)
            allowed = tf.debugging.Assert(tf.logical_not(self._is_refusing), [REFUSED])
            with tf.control_dependencies([allowed]):
                begun = progress.begin(kind, sent, len(fixed))
            with tf.control_dependencies([begun]):
                yield progress.end
            return
        with self._one_at_a_time, self._explaining():
            self._begin(kind, [(each.dtype.name, tuple(each.shape)) for each in sent], len(fixed), peer)
            try:
                yield lambda results: None
            finally:
                self.activity.end()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except (tf.errors.OpError, EngineError) as error:
            explained = self.explain(error)
            if explained is None:
                raise
            raise explained from error

    def _message_progress(self, kind: str, peer: int) -> Progress:
        if kind not in self._progress_of_messages:
            self._progress_of_messages[kind] = Progress()
            look = self._progress_of_messages[kind].look
            self.activity.group_progress.append((look, self._participants(peer) or ()))
        return self._progress_of_messages[kind]

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
        if self._shared is not None:
            return self._shared.sum(buffers)
        is_eager = tf.executing_eagerly() and not tf.config.functions_run_eagerly()
        if is_eager and sum(len(self._cut(buffer)) for buffer in buffers) > 1:
            # As a function, for eagerly one op waits for the other.
            key = tuple((buffer.dtype, flat.size(buffer)) for buffer in buffers)
            if key not in self._functions:
                self._functions[key] = tf.function(self._sum_buffers, autograph=False)
            return list(self._functions[key](list(buffers)))
        for buffer in buffers:
            totals = []
            for start, stop in self._cut(buffer):
                totals.append(self._lane(buffer.dtype, count).reduce(buffer[start:stop]))
                count += 1
            sums.append(totals[0] if len(totals) == 1 else tf.concat(totals, 0))
        return sums

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
        return tf.cond(tf.size(buffer) > 0, lambda: lane.reduce(buffer), lambda: tf.identity(buffer))

    def _lane(self, dtype: tf.DType, count: int) -> Lane:
        if self._gpu_lane is not None and dtype.is_floating:
            return self._gpu_lane
        return self._lanes[count % LANES]

    def _gather_tensors(
        self, tensors: Sequence[tf.Tensor], lengths: Sequence[Sequence[int]] | None = None
    ) -> list[tf.Tensor]:
        if not tensors:
            return []
        if self._shared is not None:
            return self._shared.gather(tensors, lengths)
        if lengths is None:
            rows = self._lanes[0].gather(tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in tensors]))
        else:
            rows = tf.transpose(tf.constant([list(counts) for counts in lengths], tf.int64))
        row_bytes = tf.stack([tf.reduce_prod(tf.shape(tensor, tf.int64)[1:]) * tensor.dtype.size for tensor in tensors])
        sizes = rows * row_bytes
        totals = tf.reduce_sum(sizes, 1)
        mine = tf.concat([flat.to_bytes(tensor) for tensor in tensors], 0)
        # One word at least: TensorFlow crashes when it gathers nothing.
        words = flat.to_words(mine, tf.cast(tf.maximum(-(-tf.reduce_max(totals) // 4), 1), tf.int32))
        received = flat.from_words(self._lanes[0].gather(words))
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
        # A rank that is not reached here has ended before the answer was read, or has died, which its launcher sees.
        with contextlib.suppress(EngineError, tf.errors.OpError):
            with self._exchange("barrier"):
                self._lanes[0].reduce(tf.zeros([1], tf.int32), is_last=True)
            time.sleep(_LINGER)


def _rows(flat_bytes: tf.Tensor, count: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Returns bytes as rows of the shape and dtype of those of `like`."""
    shape = tf.concat([[count], tf.shape(like, tf.int64)[1:]], 0)
    rows = tf.reshape(flat.from_bytes(flat_bytes, like.dtype), shape)
    return rows if like.shape.rank is None else tf.ensure_shape(rows, [None, *like.shape[1:]])


def _place(address: str) -> list[Any]:
    """Returns what identifies this process's GPU among all of the job: host, visible devices, names of GPUs."""
    gpus = [gpu.name for gpu in tf.config.get_visible_devices("GPU")]
    return [cluster_start.host(address), os.environ.get("CUDA_VISIBLE_DEVICES", ""), *gpus]


def _each_has_a_gpu(everyone: Sequence[list[Any]]) -> bool:
    """Returns whether every rank has one GPU, each its own: NCCL refuses to share."""
    return all(len(each) == 3 for each in everyone) and len({tuple(each) for each in everyone}) == len(everyone)
