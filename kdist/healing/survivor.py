"""A rank that goes on in its process when another one was killed, with a new number among those that are left."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from kdist.cluster import detect
from kdist.cluster.own_rank import forget_rank
from kdist.errors import EngineError
from kdist.healing.process_snapshot import ProcessSnapshot, has_gpu
from kdist.reports import breakpoint_hook, failure
from kdist.reports.scope_marks import own_scopes
from kdist.restarts.events import Healing, Kind, own_reports
from kdist.restarts.healing import Peers, ShrinkResult, own_healing
from kdist.restarts.progress import own_progress

_WRITER = "kdist-checkpoint"  # the name of the thread that writes checkpoints
_WRITER_TIMEOUT = 60.0  # seconds
_ABORTS_FIRST = 5.0  # seconds that the first rank has to end the job


class Survivor:
    """What a process needs to run its script again.

    Args:
        least: int, the fewest ranks that go on.
        hook: `FailureHook` of this process.
        become_chief: function that is called once this process is rank 0 and was not before.
    """

    def __init__(self, least: int, hook: failure.FailureHook, become_chief: Callable[[], object]) -> None:
        self._least = least
        self._become_chief = become_chief
        self._snapshot = ProcessSnapshot()
        self._hook = hook
        own_healing.is_on = True
        atexit.register(_exit_at_once)  # registered first, called last

    def goes_on_after(self, error: BaseException | None) -> bool:
        """Returns whether the script ended since another rank was lost, so that it is run again.

        A script may catch the error of its collective, and come to an end.

        Args:
            error: the exception that it raised, or `None` if it came to its end.
        """
        if own_healing.is_broken:
            return error is None or isinstance(error, Exception)
        return isinstance(error, Exception) and own_healing.has_lost()

    def heal(self) -> None:
        """Waits for the other survivors, and makes this process one of them; else ends the job, which says why.

        Collective: every rank that is left must call this.
        """
        began = time.time()
        peers = own_healing.peers
        if peers is None:
            raise EngineError(
                "No rank can go on. Received: a lost rank, and no engine on this one. Expected the engine that "
                "kdist.scope() has opened, which knows who is left. Fix: open the scope in the script itself."
            )
        if own_healing.heartbeat is not None:
            own_healing.heartbeat.pause()
        for each in threading.enumerate():
            if each.name == _WRITER:  # a `fit` that raises waits for it
                each.join(_WRITER_TIMEOUT)
        shrunk = peers.shrink(_why_not())
        if why := self._why_not(shrunk):
            _fall_back(self._hook, shrunk, why)
        own_healing.close()
        own_healing.communicator = shrunk.communicator
        self._become(shrunk, peers)
        steps_lost, saved = own_progress.begin_again(is_chief=shrunk.rank == 0)
        if shrunk.rank == 0:
            own_reports.healed(
                Healing(shrunk.lost, shrunk.lost_first, shrunk.size, platform.node(), began, steps_lost, saved)
            )
        self._snapshot.restore()

    def _why_not(self, shrunk: ShrinkResult) -> str:
        if shrunk.why_not or not shrunk.lost:
            return shrunk.why_not or "no rank is gone"
        if shrunk.size < self._least:
            return f"of at least {self._least} ranks {shrunk.size} {'is' if shrunk.size == 1 else 'are'} left"
        return ""

    def _become(self, shrunk: ShrinkResult, peers: Peers) -> None:
        """Gives this process its new number."""
        was_chief = own_reports.rank == 0
        # All ranks are on one host.
        for name, value in (("RANK", shrunk.rank), ("SIZE", shrunk.size)):
            os.environ[f"OMPI_COMM_WORLD_{name}"] = os.environ[f"OMPI_COMM_WORLD_LOCAL_{name}"] = str(value)
        forget_rank(os.environ)
        own_reports.rank = own_scopes.rank = shrunk.rank
        own_scopes.is_open = False
        info = detect(os.environ)
        sys.excepthook = self._hook
        failure.install(peers.abort, info.rank, info.size).may_report = None
        sys.breakpointhook = sys.__breakpointhook__
        breakpoint_hook.install(info, os.environ)
        if shrunk.rank == 0 and not was_chief:
            self._become_chief()


def _exit_at_once() -> None:
    """Ends a process whose script has ended well without `MPI_Finalize`, which may wait for ranks that are gone."""
    if own_healing.peers is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def _why_not() -> str:
    """Returns why this process cannot run its script again, or an empty text."""
    return "GPUs hold what a process has allocated until it ends" if has_gpu() else ""


def _fall_back(hook: failure.FailureHook, shrunk: ShrinkResult, why: str) -> NoReturn:
    """Ends the job, so that it is started again."""
    if shrunk.rank > 0:
        time.sleep(_ABORTS_FIRST)
        hook.fail("")
    if not shrunk.lost:
        hook.fail(f"the ranks cannot go on in their processes: {why}")
    what = f"was killed, and the others cannot go on in their processes: {why}"
    own_reports.failed(Kind.SIGNAL, what, shrunk.lost[0])
    hook.fail(f"rank {shrunk.lost[0]} {what}")
