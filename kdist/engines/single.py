"""The null engine: one process, alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import tensorflow as tf

from kdist.engines import arguments
from kdist.engines.engine import Engine


class SingleEngine(Engine):
    """Collectives of one process with itself: each returns what it was given.

    Wrong arguments are refused as by any other engine, so that what runs alone runs on several ranks.
    """

    name = "single"
    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    seconds = 0.0

    def allreduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """Returns the tensors; see `Engine.allreduce`."""
        return arguments.for_allreduce(tensors)

    def allgather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors; see `Engine.allgather`."""
        return arguments.for_allgather(tensors)

    def alltoall(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors; see `Engine.alltoall`."""
        return arguments.for_alltoall(tensors, self.size)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]:
        """Returns the tensors; see `Engine.broadcast`."""
        return arguments.for_broadcast(tensors, root, self.size)

    def barrier(self) -> None:
        """Returns at once; see `Engine.barrier`."""

    def abort(self, code: int = 1) -> NoReturn:
        """Flushes the standard streams and ends this process; see `Engine.abort`."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
