"""The engine over Horovod's tensor operations: the only file that imports it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from kdist.cluster.open_mpi import with_defaults, without_unused_transport
from kdist.engines.arrays.shared_memory import BARRIER, END, FAILURE, SharedMemory
from kdist.engines.engine import REFUSED, Engine, not_converted
from kdist.engines.tensors import arguments, flat, slices
from kdist.engines.tensors.ordered_calls import OrderedCalls
from kdist.engines.tensors.progress import Progress
from kdist.engines.tensors.shared_tensors import SharedTensors
from kdist.errors import EngineError, EngineNotFoundError

_INSTALL = "`kdist install-horovod`, which builds it for the installed TensorFlow and MPI"
_REBUILD = "`kdist install-horovod --force`, which builds it for the installed TensorFlow and MPI"

# Horovod's thread asks its peers in every cycle whether something is to be sent, and waits for their answers: by
# default, Open MPI spins on the core that computes. The user's own settings are kept.
_YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}
_CYCLE = {"HOROVOD_CYCLE_TIME": "0.5"}  # milliseconds

_OF_ANY_LENGTH = ("gather", "alltoallv")  # whose tensors' first dimensions differ between the ranks


class HorovodEngine(Engine):
    """Collectives over Horovod, by its MPI or its Gloo controller; on GPUs over NCCL, if Horovod was built so.

    A group of tensors costs one Horovod operation for each dtype that is summed. Horovod matches operations by their
    names, which are made of what is sent: they are equal on ranks that trace other functions, or more often. A
    variable, read before and written after, keeps a graph's collectives in program order, unused ones too. With
    `jit_compile=True` they cannot be compiled. Ranks that disagree about the next call, or about its shapes, wait,
    and after a minute Horovod logs for what (`HOROVOD_STALL_CHECK_TIME_SECONDS`).

    Where all ranks are on one host and see no GPU, they sum, and gather, in memory that they share: Horovod's thread
    takes turns with the computation on each core, and costs several times as much. With Horovod's timeline
    (`HOROVOD_TIMELINE`), which shows what Horovod sends, all goes through Horovod.

    A process that ends waits until all ranks have ended: the first to leave would shut Horovod down for all.

    Two settings are made unless the environment has them: Horovod's thread yields its core while it waits in Open MPI
    (`OMPI_MCA_mpi_yield_when_idle=1`), and looks for messages twice a millisecond (`HOROVOD_CYCLE_TIME=0.5`, but not
    where `HOROVOD_AUTOTUNE` tunes it).

    Args:
        controller: str or `None`, `"mpi"` or `"gloo"`: what the launcher needs Horovod to be built with. Collective:
            every rank must construct its engine, in the same order.
        share_memory: bool, whether ranks of one host sum, and gather, in memory that they share.

    Raises:
        EngineNotFoundError: if Horovod does not load, or was built without TensorFlow or the controller.
        EngineError: if Horovod does not start.

    Example:
        >>> engine = HorovodEngine()  # doctest: +SKIP
        >>> [total] = engine.allreduce([tf.constant([1.0, 2.0])])  # doctest: +SKIP
    """

    name = "horovod"

    def __init__(self, controller: str | None = None, *, share_memory: bool = True):
        self._hvd = _import_horovod()
        _check_controller(self._hvd, controller)
        try:
            # Horovod's tuner does not change a cycle time that is set.
            tunes = os.environ.get("HOROVOD_AUTOTUNE", "0") not in ("", "0")
            with without_unused_transport(), with_defaults(_YIELD if tunes else {**_YIELD, **_CYCLE}):
                self._hvd.init()
        except Exception as err:
            raise EngineError(
                f"Horovod does not start. Received from it: {err}. Expected all ranks to find each other. Fix: look "
                "for the first error above; start the job by horovodrun, or by the mpirun of the MPI that Horovod was "
                "built with."
            ) from err
        self.rank: int = self._hvd.rank()
        self.size: int = self._hvd.size()
        self.local_rank: int = self._hvd.local_rank()
        self.local_size: int = self._hvd.local_size()
        self._progress = Progress()
        self.activity.graph_progress = self._progress.look
        with tf.init_scope(), tf.device("CPU:0"):
            self._order = tf.Variable(0, trainable=False, name="kdist_horovod_order")
        self._shared: SharedTensors | None = None
        # The ranks decide together: each may see other devices and another environment.
        needs_horovod = bool(tf.config.get_visible_devices("GPU")) or bool(os.environ.get("HOROVOD_TIMELINE"))
        if share_memory and 1 < self.size == self.local_size and not any(self.gather_objects(needs_horovod)):
            memory = SharedMemory.open(self.rank, self.size, self.gather_objects)
            if memory is not None:
                self._shared = SharedTensors(memory, OrderedCalls("kdist_horovod_shared_order"))
        if self.size > 1:
            atexit.register(self._wait_for_the_others)  # after Horovod's own, so that it comes before

    @not_converted
    def allreduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sums in one grouped operation for each dtype that is sent; see `Engine.allreduce`."""
        tensors = arguments.for_allreduce(tensors)
        dense, parts = slices.split(tensors)
        with self._exchange() as send:
            return slices.merge(tensors, self._sum(send, dense), self._gather(send, parts))

    @not_converted
    def allgather(
        self, tensors: Sequence[tf.Tensor], lengths: Sequence[Sequence[int]] | None = None
    ) -> list[tf.Tensor]:
        """Gathers all tensors in one grouped operation, as bytes; see `Engine.allgather`."""
        tensors = arguments.for_allgather(tensors, lengths, self.rank, self.size)
        with self._exchange() as send:
            return self._gather(send, tensors, lengths)

    @not_converted
    def reduce_scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Exchanges the ranks' parts and adds them; see `Engine.reduce_scatter`."""
        if self._shared is None:
            # Horovod's own operation is not the same over each controller, and sums halves as halves.
            return super().reduce_scatter(tensors)
        tensors = arguments.for_reduce_scatter(tensors)
        if not tensors:
            return []
        in_memory = _without_names(self._shared.reduce_scatter)
        shapes = [flat.part(tensor, self.rank, self.size).shape for tensor in tensors]
        with self._exchange() as send:
            return send("reduce_scatter", in_memory, tensors, shapes)

    @not_converted
    def alltoall(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends all tensors' rows, as words, in one operation; see `Engine.alltoall`."""
        tensors = arguments.for_alltoall(tensors, self.size)
        if not tensors:
            return []
        words = flat.rows_to_words(tensors)
        received, _ = self._exchange_rows("alltoall", words, tf.ones([self.size], tf.int32), words.shape)
        return flat.rows_from_words(received, tensors)

    @not_converted
    def alltoallv(self, tensors: Sequence[tf.Tensor], counts: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sends all tensors' rows, as words, in one operation; see `Engine.alltoallv`."""
        tensors, counts = arguments.for_alltoallv(tensors, counts, self.size)
        if not tensors:
            [received_counts] = self.alltoall([counts])
            return [], received_counts
        words = flat.rows_to_words(tensors)
        shape = slices.any_length(words.shape)
        received, received_counts = self._exchange_rows("alltoallv", words, tf.cast(counts, tf.int32), shape)
        return flat.rows_from_words(received, tensors), tf.cast(received_counts, tf.int64)

    def _exchange_rows(
        self, kind: str, words: tf.Tensor, counts: tf.Tensor, shape: tf.TensorShape
    ) -> tuple[tf.Tensor, tf.Tensor]:
        def operation(buffers: list[tf.Tensor], **names: Any) -> list[tf.Tensor]:
            return list(self._hvd.alltoall(buffers[0], splits=counts, **names))

        with self._exchange() as send:
            received, received_counts = send(kind, operation, [words], [shape, counts.shape])
        return received, received_counts

    def send(self, tensors: Sequence[tf.Tensor], to: int) -> None:
        """Raises `EngineError`: Horovod cannot send to one rank. See `Engine.send`."""
        raise _missing("messages from one rank to another")

    def recv(self, like: Sequence[tf.Tensor | tf.TensorSpec], source: int) -> list[tf.Tensor]:
        """Raises `EngineError`: Horovod cannot receive from one rank. See `Engine.recv`."""
        raise _missing("messages from one rank to another")

    def _join(self, ranks: Sequence[int], members: tuple[int, ...]) -> None:
        # Its process sets must be known when it is initialised, or slow down each of its cycles.
        raise _missing("groups of ranks")

    @not_converted
    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        """Sends all tensors as one buffer of bytes; see `Engine.broadcast`."""
        tensors = arguments.for_broadcast(tensors, root, self.size)
        if not tensors:
            return []
        parts = [flat.to_bytes(tensor) for tensor in tensors]
        buffer = tf.concat([*parts, tf.zeros([1], tf.uint8)], 0)  # Horovod sends nothing that is empty

        def operation(buffers: list[tf.Tensor], **names: Any) -> list[tf.Tensor]:
            return [self._hvd.broadcast(buffers[0], root, **names)]

        with self._exchange() as send:
            [received] = send(f"broadcast_{root}", operation, [buffer], [buffer.shape])
        received_parts = flat.split(received, [*[flat.size(part) for part in parts], 1])
        return [
            flat.shaped(flat.from_bytes(part, tensor.dtype), tensor)
            for part, tensor in zip(received_parts, tensors, strict=False)
        ]

    @not_converted
    def barrier(self) -> None:
        """Waits for all ranks, when the graph runs if called in one; see `Engine.barrier`."""
        with self._exchange() as send:
            self._meet(send, "barrier", BARRIER)

    def _refuse_in_graphs(self, refuses: bool) -> None:
        with tf.init_scope():
            self._order.assign(int(refuses))

    def explain(self, error: BaseException) -> EngineError | None:
        """Returns what an error of Horovod's operations means; see `Engine.explain`."""
        if not isinstance(error, (tf.errors.OpError, EngineError)):
            return None
        text = str(error)
        if refusal := self._refusal_in(text):
            return refusal
        if FAILURE in text:
            received = f": {text.partition(FAILURE)[2].splitlines()[0]}"
        elif isinstance(error, tf.errors.OpError) and "orovod" in error.message:
            # A graph's message begins with where its nodes were made.
            _, _, last = error.message.rpartition("\n\n")
            received = f" from Horovod: {last}"
        else:
            return None
        explained = EngineError(
            f"A collective failed on rank {self.rank} of {self.size}. Received{received}. Expected: "
            "every rank runs, and calls the same collectives in the same order, with equal shapes and dtypes. Fix: "
            "look for another rank's error, and for a branch, a shape or a number of steps that depends on the rank."
        )
        explained.is_consequence = "has been shut down" in received or "has ended" in received
        return explained

    def _add(self, group: list[tf.Tensor], **names: Any) -> list[tf.Tensor]:
        sums: list[tf.Tensor] = self._hvd.grouped_allreduce(group, op=self._hvd.Sum, **names)
        return sums

    def _meet(self, send: _Send, kind: str, word: int) -> None:
        """Waits for all ranks; takes no part in a sum of another one that makes another call."""
        shared, nothing = self._shared, tf.zeros([1])
        meet = self._add if shared is None else _without_names(functools.partial(shared.meet, word))
        send(kind, meet, [nothing], [nothing.shape])

    def _sum(self, send: _Send, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        sent = [flat.to_summable(tensor) for tensor in tensors]
        if self._shared is not None and all(each.shape.is_fully_defined() for each in sent):
            in_memory = _without_names(self._shared.sum)
            sums = flat.sum_together(sent, lambda group: send("sum", in_memory, group, [each.shape for each in group]))
            return [flat.from_summable(total, tensor) for total, tensor in zip(sums, tensors, strict=True)]
        sums = list(sent)
        for dtype in dict.fromkeys(tensor.dtype for tensor in sent):
            places = [place for place, tensor in enumerate(sent) if tensor.dtype == dtype]
            group = [sent[place] for place in places]
            for place, total in zip(places, send("sum", self._add, group, [t.shape for t in group]), strict=True):
                sums[place] = total
        return [flat.from_summable(total, tensor) for total, tensor in zip(sums, tensors, strict=True)]

    def _gather(
        self, send: _Send, tensors: Sequence[tf.Tensor], lengths: Sequence[Sequence[int]] | None = None
    ) -> list[tf.Tensor]:
        if not tensors:
            return []
        if self._shared is not None:
            in_memory = _without_names(functools.partial(self._shared.gather, lengths=lengths))
            return send("gather", in_memory, list(tensors), slices.gathered_shapes(tensors, lengths))
        sent = [_rows_to_bytes(tensor) for tensor in tensors]
        shapes = [slices.any_length(part.shape) for part in sent]
        received = send("gather", self._hvd.grouped_allgather, sent, shapes)
        return [
            _rows_from_bytes(part, tensor.dtype, slices.any_length(tensor.shape))
            for part, tensor in zip(received, tensors, strict=True)
        ]

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[_Send]:
        """Yields a function that sends one group of tensors, all of one dtype, after what was sent before.

        TensorFlow treats Horovod's operations as pure functions: it may fold those of constants, remove those whose
        result is not used, and run the others in any order. In a graph the tensors are therefore made to depend on a
        variable that is written when the results are there.
        """
        self.check_allowed()
        if tf.executing_eagerly():
            try:
                yield self._send_now
            except (tf.errors.OpError, EngineError) as err:
                if (explained := self.explain(err)) is None:
                    raise
                raise explained from err
            finally:
                self.activity.end()
            return
        sizes: list[tf.Tensor] = []
        zero = self._order.read_value()
        allowed = tf.debugging.Assert(zero == 0, [REFUSED])

        def send(kind: str, operation: _Operation, tensors: list[tf.Tensor], shapes: list[Any]) -> list[tf.Tensor]:
            first, *others = [tf.stop_gradient(tensor) for tensor in tensors]
            dims = [tf.rank(first)]
            first = tf.slice(first, tf.fill(dims, zero), tf.fill(dims, -1))  # all of it, without a copy
            first.set_shape(tensors[0].shape)
            with tf.control_dependencies([allowed]):
                begun = self._progress.begin(kind, tensors, 0 if kind in _OF_ANY_LENGTH else len(tensors))
            with tf.control_dependencies([begun]):
                received = operation([first, *others], name=_name(kind, tensors), ignore_name_scope=True)
            self._progress.end(received)
            # Not `tf.size`, which is a constant where the shape is known, and depends on nothing.
            sizes.append(tf.raw_ops.Size(input=received[0]))
            for result, shape in zip(received, shapes, strict=True):
                result.set_shape(shape)
            return received

        yield send
        if sizes:
            # Zero again, computed from the results: a control dependency would not keep them from being removed.
            self._order.assign(tf.minimum(zero, tf.add_n(sizes)))

    def _send_now(
        self, kind: str, operation: _Operation, tensors: list[tf.Tensor], shapes: list[Any]
    ) -> list[tf.Tensor]:
        sent = [(tensor.dtype.name, tuple(tensor.shape)) for tensor in tensors]
        self.activity.begin(kind, sent, 0 if kind in _OF_ANY_LENGTH else len(sent))
        return operation(tensors, name=_name(kind, tensors))

    def _wait_for_the_others(self) -> None:
        """Waits until every rank is at its exit."""
        if not self._hvd.is_initialized():
            return

        def end() -> None:
            with self._exchange() as send:
                self._meet(send, "end", END)

        with contextlib.suppress(EngineError, tf.errors.OpError):  # another rank has failed, and has raised its error
            self.activity.begin("barrier", [], 0)
            # Eagerly, Horovod gives all sums one name: this one would match that of a rank which has not ended yet.
            tf.function(end, autograph=False)()


_Operation = Callable[..., list[tf.Tensor]]
_Send = Callable[[str, _Operation, list[tf.Tensor], list[Any]], list[tf.Tensor]]


def _name(kind: str, tensors: Sequence[tf.Tensor]) -> str:
    """Returns the name by which Horovod matches the ranks' operations: made of what is sent, equal on all ranks."""
    shapes = [tensor.shape[1:] if kind in _OF_ANY_LENGTH else tensor.shape for tensor in tensors]
    signature = [(tensor.dtype.name, str(shape)) for tensor, shape in zip(tensors, shapes, strict=True)]
    return f"kdist_{kind}_{hashlib.sha256(repr(signature).encode()).hexdigest()[:12]}"


def _without_names(function: Callable[[list[tf.Tensor]], list[tf.Tensor]]) -> _Operation:
    """Returns a function as an operation: in shared memory nothing is matched by name."""
    return lambda tensors, **names: function(tensors)


def _missing(what: str) -> EngineError:
    return EngineError(
        f"Horovod has no {what}. Received: such a call on the engine 'horovod'. Expected: the engine 'mpi' or "
        '\'collective\', which have them. Fix: kdist.scope(strategy="mpi") under mpirun, or strategy="collective".'
    )


def _rows_to_bytes(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's bytes, with one more axis if an element has several: the rows stay the same."""
    return tf.cast(tensor, tf.uint8) if tensor.dtype.is_bool else tf.bitcast(tensor, tf.uint8)


def _rows_from_bytes(received: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
    tensor = tf.cast(received, dtype) if dtype.is_bool else tf.bitcast(received, dtype)
    tensor.set_shape(shape)
    return tensor


def built_with_nccl() -> bool:
    """Returns whether Horovod is installed and was built with NCCL."""
    try:
        return bool(_import_horovod().nccl_built())
    except EngineNotFoundError:
        return False


def _import_horovod() -> Any:
    try:
        import horovod.tensorflow as hvd
    except (ImportError, tf.errors.OpError, OSError) as err:
        raise EngineNotFoundError(_why_not_imported(err)) from err
    return hvd


def _why_not_imported(err: Exception) -> str:
    received = f"Received: {type(err).__name__}: {err}"
    if isinstance(err, ModuleNotFoundError) and err.name in ("horovod", "horovod.tensorflow"):
        return f"Horovod is not installed. {received}. Expected the package horovod. Fix: {_INSTALL}."
    if "has not been built" in str(err):
        return f"Horovod was built without TensorFlow. {received}. Expected its TensorFlow library. Fix: {_REBUILD}."
    return (
        f"Horovod does not load: it was built for another TensorFlow or MPI than the installed ones. {received}. "
        f"Expected one that was built for TensorFlow {tf.__version__}. Fix: {_REBUILD}."
    )


def _check_controller(hvd: Any, controller: str | None) -> None:
    built = {"mpi": hvd.mpi_built(), "gloo": hvd.gloo_built()}
    if controller is not None and not built[controller]:
        present = ", ".join(name for name, there in built.items() if there) or "none"
        raise EngineNotFoundError(
            f"Horovod was built without the controller that this launch needs. Received: a job that needs "
            f"{controller!r} and a Horovod with {present}. Expected {controller!r} among them. Fix: {_REBUILD}, with "
            "an MPI's mpicxx on PATH; or start the job by `horovodrun --gloo`."
        )
