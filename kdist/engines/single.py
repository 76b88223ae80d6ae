"""The engine of a job of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kdist.engines.engine import Engine
from kdist.engines.tensors import arguments


class SingleEngine(Engine):
    """Collectives of one process with itself: each returns what it was given.

    Wrong arguments are refused as by any other engine, so that what runs in one process runs on several.
    """

    name = "single"
    rank = 0
    size = 1
    local_rank = 0
    local_size = 1

    @property
    def seconds(self) -> float:
        """No seconds; see `Engine.seconds`."""
        return 0.0

    def _join(self, ranks: Sequence[int], members: tuple[int, ...]) -> None:
        """Does nothing: the only group is all ranks."""

    def allreduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """Returns the tensors; see `Engine.allreduce`."""
        return arguments.for_allreduce(tensors)

    def reduce_scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors; see `Engine.reduce_scatter`."""
        return arguments.for_reduce_scatter(tensors)

    def allgather(
        self, tensors: Sequence[tf.Tensor], lengths: Sequence[Sequence[int]] | None = None
    ) -> list[tf.Tensor]:
        """Returns the tensors; see `Engine.allgather`."""
        return arguments.for_allgather(tensors, lengths, self.rank, self.size)

    def alltoall(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors; see `Engine.alltoall`."""
        return arguments.for_alltoall(tensors, self.size)

    def alltoallv(self, tensors: Sequence[tf.Tensor], counts: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the tensors and the counts; see `Engine.alltoallv`."""
        return arguments.for_alltoallv(tensors, counts, self.size)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        """Returns the tensors; see `Engine.broadcast`."""
        return arguments.for_broadcast(tensors, root, self.size)

    def send(self, tensors: Sequence[tf.Tensor], to: int) -> None:
        """Raises `EngineError`: there is no other rank. See `Engine.send`."""
        arguments.for_send(tensors, to, self.rank, self.size)

    def recv(self, like: Sequence[tf.Tensor | tf.TensorSpec], source: int) -> list[tf.Tensor]:
        """Raises `EngineError`: there is no other rank. See `Engine.recv`."""
        arguments.for_recv(like, source, self.rank, self.size)
        return []

    def barrier(self) -> None:
        """Returns at once; see `Engine.barrier`."""
