"""The interface of all engines: collectives over a fixed group of ranks, and messages between two of them.

An engine knows tensors and ranks; it does not know Keras. Its collectives work eagerly and inside
`tf.function`. The engine of one process (`single.py`) makes `if distributed:` branches needless.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from kdist.cluster.own_output import flush_output
from kdist.errors import EngineError
from kdist.watch.activity import Activity

if TYPE_CHECKING:
    import tensorflow as tf

REFUSED = "kdist refuses this collective"
"""The message by which a graph, where no Python runs, refuses a collective."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def not_converted(method: _Method) -> _Method:
    """Keeps AutoGraph, which would rewrite what a `tf.function` calls, away from a method."""
    import tensorflow as tf  # not before an engine is loaded that needs it

    return tf.autograph.experimental.do_not_convert(method)


class Engine(abc.ABC):
    """Collectives over a fixed group of ranks.

    Attributes:
        name: str, the engine's name as in `kdist.scope(strategy=...)`.
        rank: int, this process's number, from 0.
        size: int, the number of processes.
        local_rank: int, this process's number on its host, from 0.
        local_size: int, the number of processes on this host.
    """

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    _members: tuple[int, ...] | None = None  # of a group, their ranks among all; `None` for all ranks

    @property
    def seconds(self) -> float | None:
        """The seconds that this process has spent in collectives, waiting included; `None` if they are not measured."""
        return None

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """For each rank of this engine, its rank among all processes of the job."""
        return tuple(range(self.size)) if self._members is None else self._members

    def group(self, ranks: Sequence[int]) -> Engine:
        """Returns an engine among some of the ranks; every rank gives the ranks of its own group.

        The group's ranks are numbered from 0 in the order of `ranks`. Its rules are those of this engine, `refusing`
        and the failure detector included. What is collective then means every rank of the group.

        Collective: every rank must call this, in the same order.

        Args:
            ranks: sequence of ints, ranks of this engine in ascending order, this rank's own among them. Each of them
                must give the same ranks, so that the groups of one call do not overlap.

        Returns:
            An `Engine`; this one if `ranks` are all of its ranks.

        Raises:
            EngineError: if the ranks of a group give different ranks, or the engine has no groups.

        Example:
            >>> pair = engine.group([0, 1] if engine.rank < 2 else [2, 3])  # doctest: +SKIP
        """
        from kdist.engines.tensors.arguments import check_group

        mine = check_group(ranks, self.rank, self.size)
        everyone = self.gather_objects(mine)
        for rank, given in enumerate(everyone):
            if (differing := next((each for each in given if everyone[each] != given), None)) is not None:
                raise EngineError(
                    f"The ranks of a group give different groups. Received: {given} from rank {rank}, "
                    f"{everyone[differing]} from rank {differing}. Expected: the same ranks from each of them. Fix: "
                    "compute the group so that it is equal on all of its ranks."
                )
        if len(mine) == self.size:
            return self
        _ = self.activity, self._refusals  # made before they are shared
        group = copy.copy(self)
        group._join(mine, tuple(self.world_ranks[each] for each in mine))
        return group

    @abc.abstractmethod
    def _join(self, ranks: Sequence[int], members: tuple[int, ...]) -> None:
        """Turns this object, a copy of an engine, into that of a group: sets rank and size, and `_members`.

        Args:
            ranks: sequence of ints, the group's ranks in the engine that was copied.
            members: tuple of ints, the same ranks among all processes of the job.
        """

    @abc.abstractmethod
    def allreduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sums tensors over all ranks, elementwise, in one grouped exchange.

        `float16` and `bfloat16` are summed in `float32`. `tf.IndexedSlices` keep every rank's slices, in
        rank order, unsummed: the same gradient as one process would have had for the concatenated batch.

        Collective: every rank must call this, in the same order.

        Args:
            tensors: sequence of tensors of any shape and of integer, float or complex dtype, in any
                mixture; shapes and dtypes must be equal on all ranks (for `tf.IndexedSlices`, all but
                the number of slices).

        Returns:
            A list of tensors with the shapes and dtypes of `tensors`, equal bit for bit on all ranks.

        Raises:
            EngineError: if a dtype cannot be summed.
        """

    def reduce_scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors over all ranks, and gives each rank its rows of the sums.

        The first dimension `n` is split into consecutive parts of near-equal length: rank `r` of `size` gets the rows
        from `r * n // size` to `(r + 1) * n // size`, see `kdist.engines.arrays.fusion.part_bounds`. `float16` and
        `bfloat16` are summed in `float32`.

        Collective: every rank must call this, in the same order.

        Args:
            tensors: sequence of tensors of known shape, of rank at least 1, and of integer, float or complex dtype;
                shapes and dtypes must be equal on all ranks.

        Returns:
            A list of tensors of the dtypes of `tensors`: this rank's rows, none if there are fewer rows than ranks.

        Raises:
            EngineError: if a tensor is a scalar, its shape is not known, or its dtype cannot be summed.
        """
        from kdist.engines.tensors import arguments, flat

        tensors = arguments.for_reduce_scatter(tensors)
        received = self.alltoall([flat.rows_by_rank(tensor, self.size) for tensor in tensors])
        return [flat.sum_of_parts(*each, self.rank) for each in zip(received, tensors, strict=True)]

    @abc.abstractmethod
    def allgather(
        self, tensors: Sequence[tf.Tensor], lengths: Sequence[Sequence[int]] | None = None
    ) -> list[tf.Tensor]:
        """Concatenates each tensor over all ranks along its first axis, in rank order.

        Collective: every rank must call this, in the same order.

        Args:
            tensors: sequence of tensors of rank at least 1 and of any numeric or `bool` dtype. All but
                the first dimension must be equal on all ranks; the first may differ and may be 0.
            lengths: for each tensor, its first dimension on each rank, if all ranks know them: most engines then send
                one message less.

        Returns:
            A list of tensors; the first dimension of each is the sum of the ranks' own.

        Raises:
            EngineError: if a tensor is a scalar, its dtype cannot be sent, or it has other rows than `lengths` says.
        """

    @abc.abstractmethod
    def alltoall(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends row `i` of each tensor to rank `i`.

        Collective: every rank must call this, in the same order.

        Args:
            tensors: sequence of tensors of any numeric or `bool` dtype, whose first dimension is the number of ranks;
                shapes and dtypes must be equal on all ranks.

        Returns:
            A list of tensors with the shapes and dtypes of `tensors`; row `i` of each is what rank `i` had in the row
            of this rank.

        Raises:
            EngineError: if a first dimension is not the number of ranks, or a dtype cannot be sent.
        """

    @abc.abstractmethod
    def alltoallv(self, tensors: Sequence[tf.Tensor], counts: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sends rows of each tensor to the other ranks: the first `counts[0]` rows to rank 0, the next to rank 1, ...

        Collective: every rank must call this, in the same order.

        Args:
            tensors: sequence of tensors of any numeric or `bool` dtype and of as many rows, the sum of `counts`. All
                but the first dimension must be known and equal on all ranks, dtypes too.
            counts: integer tensor of shape `(size,)`, how many rows each rank gets; it may differ between the ranks.

        Returns:
            A pair of a list of tensors, the rows that this rank has received, in the order of the senders' ranks,
            and an `int64` tensor of shape `(size,)`, how many rows each rank has sent.

        Raises:
            EngineError: if the counts do not fit the tensors, or a dtype cannot be sent. In a `tf.function`, counts
                that are computed there raise `tf.errors.InvalidArgumentError`.
        """

    @abc.abstractmethod
    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        """Sends the root's tensors to every rank.

        Collective: every rank must call this, in the same order.

        Args:
            tensors: sequence of tensors of any shape and of any numeric or `bool` dtype; shapes and
                dtypes must be equal on all ranks.
            root: int, the rank whose values are taken.

        Returns:
            A list of tensors, the root's values on every rank.

        Raises:
            EngineError: if `root` is no rank, or a dtype cannot be sent.
        """

    @abc.abstractmethod
    def send(self, tensors: Sequence[tf.Tensor], to: int) -> None:
        """Sends tensors to one other rank, as one message, and does not wait until it is received.

        Messages from one rank to another arrive in the order of sending. Two ranks may send to each other first and
        receive then.

        Args:
            tensors: sequence of tensors of known shape and of any numeric or `bool` dtype.
            to: int, the rank that calls `recv`.

        Raises:
            EngineError: if `to` is not another rank, a shape is not known, or a dtype cannot be sent.
        """

    @abc.abstractmethod
    def recv(self, like: Sequence[tf.Tensor | tf.TensorSpec], source: int) -> list[tf.Tensor]:
        """Returns the tensors of the next message from one other rank; waits for it.

        Args:
            like: sequence of tensors or `tf.TensorSpec`, of the shapes and dtypes that are sent.
            source: int, the rank that calls `send`.

        Returns:
            A list of tensors.

        Raises:
            EngineError: if `source` is not another rank, a shape is not known, or the message has another size.
        """

    @abc.abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has called it.

        Collective: every rank must call this, in the same order.
        """

    def abort(self, code: int = 1) -> NoReturn:
        """Ends all ranks of the job at once, without a message: flushes the standard streams and ends this process.

        Its launcher ends the others, or an engine does.

        Args:
            code: int, the exit code, from 1 to 255.
        """
        flush_output()
        os._exit(code)

    @functools.cached_property
    def activity(self) -> Activity:
        """What this rank does, for the failure detector: engines note when a collective begins and ends."""
        return Activity()

    @functools.cached_property
    def _refusals(self) -> list[str]:
        """Why collectives are refused now, the latest reason last; shared by an engine and its groups."""
        return []

    @contextlib.contextmanager
    def refusing(self, why: str) -> Iterator[None]:
        """Refuses every collective while the context is open: for code that runs on this rank only.

        Refused are those of this engine, of its groups, and of the engine that it is a group of. In a job of one rank
        nothing is refused.

        Args:
            why: str, what runs on this rank only, as the beginning of a sentence.
        """
        self._refusals.append(why)
        try:
            self._refuse_in_graphs(True)
            yield
        finally:
            self._refuse_in_graphs(False)
            self._refusals.pop()

    def _refuse_in_graphs(self, refuses: bool) -> None:  # noqa: B027  not needed where graphs call Python
        """Sets whether graphs that were traced before refuse collectives, too."""

    def check_allowed(self) -> None:
        """Raises `EngineError` if collectives are refused now; every engine calls this before it sends anything."""
        if self.size == 1:
            return
        from kdist._tf_internals import is_compiled_by_xla  # not before an engine sends something: it loads TensorFlow

        if is_compiled_by_xla():
            raise EngineError(
                "A function that XLA compiles sends a message between ranks, which XLA cannot compile. Received: a "
                f"collective on rank {self.rank} of {self.size}, in a tf.function(jit_compile=True). Expected: none "
                "there; an optimizer's update, a synchronised layer and kdist.all_reduce are collectives. Fix: remove "
                "jit_compile=True; model.compile(jit_compile=True) with fit compiles all but the messages."
            )
        if self._refusals:
            raise EngineError(
                f"{self._refusals[-1]}, and starts a collective there, which the other ranks never join. "
                f"Received: a collective on rank {self.rank} of {self.size} only. Expected: none there, because this "
                "rank would wait forever: no fit, evaluate or predict of a model that several ranks train, and no call "
                "of the engine. Fix: let all ranks run it."
            )

    def _begin(self, kind: str, sent: Sequence[tuple[Any, Any]], num_fixed: int, peer: int | None = None) -> None:
        """Notes that a collective, or a message to or from one rank, begins; see `Activity.begin`."""
        self.activity.begin(kind, sent, num_fixed, self._participants(peer))

    def _participants(self, peer: int | None = None) -> tuple[int, ...] | None:
        """Returns who takes part, as ranks of the job; `None` for all."""
        if peer is None:
            return self._members
        return tuple(sorted((self.world_ranks[self.rank], self.world_ranks[peer])))

    def explain(self, error: BaseException) -> EngineError | None:
        """Returns a clearer error in place of one that a graph with collectives has raised.

        Args:
            error: what was raised where the graph was run.

        Returns:
            An `EngineError`, or `None` if the error does not come from this engine or is clear already.
        """
        return None

    def _refusal_in(self, text: str) -> EngineError | None:
        """Returns what `check_allowed` raises if a graph's message says that it has refused a collective."""
        if REFUSED in text:
            try:
                self.check_allowed()
            except EngineError as refusal:
                return refusal
        return None

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's value, in rank order.

        Values are sent as JSON: nothing that comes from another rank is ever unpickled.

        Collective: every rank must call this, in the same order.

        Args:
            value: anything that `json` can write.

        Returns:
            A list of `size` values; tuples come back as lists.

        Raises:
            EngineError: if `json` cannot write the value.
        """
        import numpy as np

        self.check_allowed()
        try:
            text = json.dumps(value).encode()
        except (TypeError, ValueError) as err:
            raise EngineError(
                f"The value cannot be sent between ranks as JSON. Received on rank {self.rank} of {self.size}: "
                f"{type(value).__name__}; json reports: {err}. Expected: None, bool, int, float, str, list, "
                "tuple or dict. Fix: convert the value first."
            ) from err
        mine = np.frombuffer(text, np.uint8)
        everyone, lengths = self._of_arrays("allgather", [mine, np.array([len(mine)])])
        return [json.loads(part.tobytes()) for part in np.split(everyone, np.cumsum(lengths)[:-1])]

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Returns the sums of some `float32` numbers over the ranks, at once; see `allreduce`.

        Collective: every rank must call this, in the same order.
        """
        import numpy as np

        return list(self._of_arrays("allreduce", [np.array(numbers, np.float32)])[0])

    def _of_arrays(self, collective: str, arrays: Sequence[Any]) -> list[Any]:
        """Returns what a collective returns of NumPy arrays, at once, even while a graph is being traced."""
        import tensorflow as tf

        with tf.init_scope():
            return [tensor.numpy() for tensor in getattr(self, collective)([*map(tf.constant, arrays)])]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Returns the root's value on every rank.

        Collective: every rank must call this, in the same order.

        Args:
            value: anything that `json` can write; ignored on all ranks but the root.
            root: int, the rank whose value is taken.

        Returns:
            The root's value; tuples come back as lists.

        Raises:
            EngineError: if `root` is no rank, or `json` cannot write the value.
        """
        from kdist.engines.tensors.arguments import check_root

        check_root(root, self.size)
        return self.gather_objects(value if self.rank == root else None)[root]
