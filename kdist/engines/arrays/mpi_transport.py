"""Collectives and messages of NumPy arrays over an MPI communicator; what imports mpi4py hands it in."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kdist.engines.arrays import fusion, gathering, scattering
from kdist.engines.arrays.fusion import Array
from kdist.engines.arrays.mpi_peers import MPIPeers
from kdist.errors import EngineError

_LOG = logging.getLogger("kdist")

_EXCHANGE_TAG = 1  # messages of `send` have 0
_UNTIL_ALL_KNOW = 1.0  # seconds
_WAIT_IS_LONG = 30.0  # seconds after which a rank that has finished logs that it waits for the others


class MPITransport:
    """Moves arrays between the ranks of one communicator, by one thread at a time.

    The methods' arguments are not checked: `Engine` documents them.

    Args:
        mpi: the module `mpi4py.MPI`, initialised.
        communicator: `mpi4py.MPI.Intracomm`, used by nothing else.

    Attributes:
        message_limit: int, the most bytes of one message: MPI counts in 32 bits, so longer ones are sent in pieces.
    """

    message_limit = 1 << 30

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self._mpi = mpi
        self._comm = communicator
        self._sends: list[Any] = []
        self._peers: MPIPeers | None = None
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        host = communicator.Split_type(mpi.COMM_TYPE_SHARED)
        self.local_rank: int = host.Get_rank()
        self.local_size: int = host.Get_size()
        host.Free()

    def join(self, peers: MPIPeers) -> None:
        """Lets the ranks of this transport go on without one that is lost.

        Args:
            peers: `MPIPeers`, which revokes the communicator then.
        """
        self._peers = peers
        peers.add(self._comm)

    def group(self, ranks: Sequence[int]) -> MPITransport:
        """Returns a transport among some ranks, this one included; each rank gives the ranks of its own group."""
        return MPITransport(self._mpi, self._comm.Split(min(ranks), self.rank))

    def sum_in_place(self, buffers: Sequence[Array]) -> None:
        """Sums 1-D arrays over all ranks, in pieces that stay in the cache."""
        for buffer in buffers:
            for piece in fusion.pieces(buffer):
                self._comm.Allreduce(self._mpi.IN_PLACE, piece)

    def allreduce(self, arrays: Sequence[Array]) -> list[Array]:
        """Sums arrays over all ranks; see `Engine.allreduce`."""
        buffers = fusion.pack(arrays)
        self.sum_in_place(buffers)
        return fusion.unpack(buffers, arrays)

    def reduce_scatter(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns this rank's rows of the sums; see `Engine.reduce_scatter`."""
        return scattering.reduce_scatter(arrays, self.rank, self.size, self._exchange)

    def allgather(self, arrays: Sequence[Array], lengths: gathering.Lengths | None = None) -> list[Array]:
        """Concatenates arrays over all ranks, small ones by one message; see `Engine.allgather`."""
        return gathering.allgather(arrays, self.rank, self.size, self.gather_bytes, lengths)

    def gather_bytes(self, mine: Array, counts: list[int]) -> Array:
        """Returns all ranks' bytes, in rank order; `counts` are their lengths."""
        everyone = fusion.empty(sum(counts), np.uint8)
        if everyone.size <= self.message_limit:
            self._comm.Allgatherv(mine, (everyone, counts))
        else:
            parts = np.split(everyone, np.cumsum(counts)[:-1])
            parts[self.rank][:] = mine
            for root, part in enumerate(parts):
                self._broadcast_bytes(part, root)
        return everyone

    def gather_text(self, text: str) -> list[str]:
        """Returns every rank's text, in rank order."""
        mine = np.frombuffer(text.encode(), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([mine.size], np.int64), lengths)
        everyone = self.gather_bytes(mine, lengths.tolist())
        return [part.tobytes().decode() for part in np.split(everyone, np.cumsum(lengths)[:-1])]

    def alltoall(self, arrays: Sequence[Array]) -> list[Array]:
        """Sends row `i` of each array to rank `i`; see `Engine.alltoall`."""
        received = []
        for array in arrays:
            result = fusion.empty(array.size, array.dtype).reshape(array.shape)
            if array.size:
                self._comm.Alltoall(np.ascontiguousarray(array).view(np.uint8), result.view(np.uint8))
            received.append(result)
        return received

    def alltoallv(self, arrays: Sequence[Array], counts: Array) -> tuple[list[Array], Array]:
        """Sends consecutive rows of each array to each rank, `counts` of them; see `Engine.alltoallv`."""
        received_counts = np.empty_like(counts)
        self._comm.Alltoall(counts, received_counts)
        received = []
        for array in arrays:
            width = math.prod(array.shape[1:]) * array.itemsize
            length = int(received_counts.sum())
            result = fusion.empty(length * width, np.uint8)
            if width:
                row = self._mpi.BYTE.Create_contiguous(width).Commit()  # MPI then counts rows, in 32 bits
                mine = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                self._comm.Alltoallv([mine, counts, row], [result, received_counts, row])
                row.Free()
            received.append(result.view(array.dtype).reshape(length, *array.shape[1:]))
        return received, received_counts

    def broadcast(self, arrays: Sequence[Array], root: int) -> list[Array]:
        """Returns the root's arrays, sent as one buffer of bytes; see `Engine.broadcast`."""
        shapes, dtypes = [array.shape for array in arrays], [array.dtype for array in arrays]
        size = fusion.byte_length(shapes, dtypes)
        buffer = fusion.to_bytes(arrays) if self.rank == root else fusion.empty(size, np.uint8)
        self._broadcast_bytes(buffer, root)
        return fusion.from_bytes(buffer, shapes, dtypes)

    def send(self, arrays: Sequence[Array], to: int) -> list[Array]:
        """Begins to send arrays as one buffer of bytes, and waits for no receiver; see `Engine.send`."""
        self._sends = [request for request in self._sends if not request.Test()]
        for piece in fusion.pieces(fusion.to_bytes(arrays), self.message_limit):
            self._sends.append(self._comm.Isend(piece, to))  # which keeps the piece until it has left
        return []

    def recv(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype], source: int) -> list[Array]:
        """Returns the next arrays from a rank; see `Engine.recv`.

        Raises:
            EngineError: if the message has another size.
        """
        buffer = fusion.empty(fusion.byte_length(shapes, dtypes), np.uint8)
        for piece in fusion.pieces(buffer, self.message_limit):
            status = self._mpi.Status()
            self._comm.Recv(piece, source, status=status)
            if (count := status.Get_count(self._mpi.BYTE)) != piece.nbytes:
                raise EngineError(
                    f"The message from rank {source} has another size than rank {self.rank} expects. Received: {count} "
                    f"bytes. Expected: {piece.nbytes} bytes, for the shapes {list(shapes)}. Fix: give `recv` the "
                    "shapes and dtypes that `send` is given on the other rank."
                )
        return fusion.from_bytes(buffer, shapes, dtypes)

    def barrier(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns when every rank has called it; sends no arrays."""
        self._comm.Barrier()
        return []

    def wait_for_exits(self) -> None:
        """Waits, nearly idle, until every rank is at its exit; MPI itself would burn a core in this wait."""
        if self._mpi.Is_finalized() or self._comm == self._mpi.COMM_NULL:
            return
        try:
            self._wait_for_exits()
        except self._mpi.Exception:
            if self._peers is None:  # else a rank was lost, and nobody is waited for any more
                raise

    def _wait_for_exits(self) -> None:
        everyone, started, pause, is_logged = self._comm.Ibarrier(), time.monotonic(), 0.001, False
        while not everyone.Test():
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if not is_logged and time.monotonic() - started > _WAIT_IS_LONG:
                is_logged = True
                _LOG.warning("rank %d of %d has finished and waits for the other ranks", self.rank, self.size)
        if "horovod" in sys.modules:
            time.sleep(_UNTIL_ALL_KNOW)  # `hvd.init()` of the user's: the first rank that exits ends MPI on all

    def _exchange(self, sent: Sequence[Array], memory: Sequence[Array]) -> Sequence[Array]:
        """Sends an array to each rank, and receives one of each; see `scattering.Exchange`."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        # Bytes, for MPI does not know each dtype; its collectives count in 32 bits from the beginning of a buffer.
        requests = [self._comm.Irecv(memory[rank].view(np.uint8), rank, _EXCHANGE_TAG) for rank in others]
        requests += [self._comm.Isend(sent[rank].view(np.uint8), rank, _EXCHANGE_TAG) for rank in others]
        self._mpi.Request.Waitall(requests)
        return [sent[rank] if rank == self.rank else memory[rank] for rank in range(self.size)]

    def _broadcast_bytes(self, buffer: Array, root: int) -> None:
        for piece in fusion.pieces(buffer):
            self._comm.Bcast(piece, root)
