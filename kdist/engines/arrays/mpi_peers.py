"""The ranks of an MPI engine, of which one may be lost: Open MPI's User Level Failure Mitigation (ULFM)."""

from __future__ import annotations

import contextlib
import os
from typing import Any, NoReturn

from kdist.errors import EngineError
from kdist.restarts.healing import ShrinkResult


class MPIPeers:
    """The ranks of a communicator, and the communicators that are made of it.

    Args:
        mpi: the module `mpi4py.MPI`, initialised.
        base: `mpi4py.MPI.Intracomm`, which is never revoked.

    Attributes:
        is_broken: bool, whether a collective of this process has failed, because a rank is gone.

    References:
        - https://fault-tolerance.org
    """

    def __init__(self, mpi: Any, base: Any) -> None:
        self.is_broken = False
        self._mpi = mpi
        self._base = base
        self._made: list[Any] = []

    def add(self, communicator: Any) -> Any:
        """Returns a communicator of these ranks, or some of them, which is revoked when one is lost."""
        self._made.append(communicator)
        return communicator

    def check(self, error: Exception) -> None:
        """Returns if an error of MPI is of another kind than the loss of a rank.

        Args:
            error: `mpi4py.MPI.Exception`.

        Raises:
            EngineError: if it is not; then no rank waits for this one any more.
        """
        if not self._is_loss(error):
            return
        self.is_broken = True
        for each in self._made:
            with contextlib.suppress(self._mpi.Exception):
                each.Revoke()
        raise EngineError(
            f"Another rank is gone. Received from MPI: {error}. Expected it to go on. Fix: none is needed, as the "
            "script is run again on the ranks that are left."
        ) from error

    def has_lost(self) -> bool:
        """Returns whether a rank is known to be gone; any thread may ask."""
        if self.is_broken or self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            return self.is_broken
        try:
            self._base.Iprobe()  # MPI learns of a loss in its calls only
            return bool(self._base.Get_failed().Get_size())
        except NotImplementedError:  # an Open MPI that was built without it
            return False
        except self._mpi.Exception as error:
            return self._is_loss(error)

    def shrink(self, why_not: str) -> ShrinkResult:
        """Returns who is left.

        Collective: every rank that is left must call this. It waits for them; one that is lost meanwhile is left out.

        Args:
            why_not: str, why this process cannot go on; empty if it can.
        """
        communicator = self._base
        while True:
            communicator = communicator.Shrink()
            communicator.Set_errhandler(self._mpi.ERRORS_RETURN)
            reasons = [""]
            try:
                reasons = communicator.allgather(why_not)
                has_all = 1
            except self._mpi.Exception:
                has_all = 0
                communicator.Revoke()
            with contextlib.suppress(self._mpi.Exception):
                if communicator.Agree(has_all):
                    break

        def lost_of(group: Any) -> tuple[int, ...]:
            lost = self._mpi.Group.Difference(group, communicator.Get_group())
            return tuple(self._mpi.Group.Translate_ranks(lost, list(range(lost.Get_size())), group))

        return ShrinkResult(
            communicator,
            communicator.Get_rank(),
            communicator.Get_size(),
            lost_of(self._base.Get_group()),
            # Those that were lost before, too: who was to report them may be lost by now.
            lost_of(self._mpi.COMM_WORLD.Get_group()),
            next(filter(None, reasons), ""),
        )

    def abort(self, code: int) -> NoReturn:
        """Ends all processes of the job.

        Args:
            code: int, the exit code, from 1 to 255.
        """
        self._mpi.COMM_WORLD.Abort(code)
        os._exit(code)

    def _is_loss(self, error: Exception) -> bool:
        losses = {self._mpi.ERR_PROC_FAILED, self._mpi.ERR_PROC_FAILED_PENDING, self._mpi.ERR_REVOKED}
        return isinstance(error, self._mpi.Exception) and error.Get_error_class() in losses
