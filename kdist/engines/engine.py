"""The interface through which ranks talk to each other.

An engine knows tensors and ranks; it does not know Keras. Its collectives work eagerly and inside
`tf.function`. The null engine (`single.py`) makes `if distributed:` branches needless.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from kdist.errors import EngineError
from kdist.watch.activity import Activity

if TYPE_CHECKING:
    import tensorflow as tf

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
        seconds: float or `None`, the time that this process has spent in collectives, waiting for other ranks
            included; `None` if the engine cannot tell.
    """

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    seconds: float | None = None
    _refusal: str | None = None

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

    @abc.abstractmethod
    def allgather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Concatenates each tensor over all ranks along its first axis, in rank order.

        Collective: every rank must call this, in the same order.

        Args:
            tensors: sequence of tensors of rank at least 1 and of any numeric or `bool` dtype. All but
                the first dimension must be equal on all ranks; the first may differ and may be 0.

        Returns:
            A list of tensors; the first dimension of each is the sum of the ranks' own.

        Raises:
            EngineError: if a tensor is a scalar or its dtype cannot be sent.
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
    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        """Gives every rank the root's tensors.

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
    def barrier(self) -> None:
        """Returns when every rank has called it.

        Collective: every rank must call this, in the same order.
        """

    @abc.abstractmethod
    def abort(self, code: int = 1) -> NoReturn:
        """Ends all ranks at once, without a word.

        Args:
            code: int, the exit code, from 1 to 255.
        """

    @functools.cached_property
    def activity(self) -> Activity:
        """What this rank does, for who watches over the ranks: engines note when a collective begins and ends."""
        return Activity()

    @contextlib.contextmanager
    def refusing(self, why: str) -> Iterator[None]:
        """Refuses every collective while the context is open: for code that this rank runs and others do not.

        In a job of one rank nothing is refused.

        Args:
            why: str, what runs here alone, as the beginning of a sentence.
        """
        outer, self._refusal = self._refusal, why
        try:
            yield
        finally:
            self._refusal = outer

    def check_allowed(self) -> None:
        """Raises `EngineError` if collectives are refused now; every engine asks before it sends anything."""
        if self._refusal is not None and self.size > 1:
            raise EngineError(
                f"{self._refusal}, and starts a collective there, for which the other ranks would never come. "
                f"Received: a collective on rank {self.rank} of {self.size} alone. Expected none, so that "
                "nobody waits for ever: no fit, evaluate or predict of a model that several ranks train, and no call "
                "of the engine. Fix: let all ranks run it."
            )

    def explain(self, error: BaseException) -> EngineError | None:
        """Returns what an error means that came out of a graph with collectives.

        Args:
            error: what was raised where the graph was run.

        Returns:
            An `EngineError` that says more, or `None` if the error is not of this engine's making or says enough.
        """
        return None

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's value, in rank order.

        Values travel as JSON: nothing that comes from another rank is ever unpickled.

        Collective: every rank must call this, in the same order.

        Args:
            value: anything that `json` can write.

        Returns:
            A list of `size` values; tuples come back as lists.

        Raises:
            EngineError: if `json` cannot write the value.
        """
        import numpy as np
        import tensorflow as tf

        self.check_allowed()
        try:
            text = json.dumps(value).encode()
        except (TypeError, ValueError) as err:
            raise EngineError(
                f"Values travel between ranks as JSON. Received on rank {self.rank} of {self.size}: "
                f"{type(value).__name__}, for which json says: {err}. Expected: None, bool, int, float, str, list, "
                "tuple or dict. Fix: convert the value first."
            ) from err
        mine = np.frombuffer(text, np.uint8)
        with tf.init_scope():  # at once, even while a graph is being traced
            everyone, lengths = self.allgather([tf.constant(mine), tf.constant([len(mine)], tf.int64)])
            parts = np.split(np.asarray(everyone), np.cumsum(np.asarray(lengths))[:-1])
        return [json.loads(part.tobytes()) for part in parts]

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
        from kdist.engines.arguments import check_root

        check_root(root, self.size)
        return self.gather_objects(value if self.rank == root else None)[root]
