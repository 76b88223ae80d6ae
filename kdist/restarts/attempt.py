"""One attempt of a job: why it ended, and how far it came."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from kdist.restarts.events import Events, Failure, Kind
from kdist.restarts.launcher_words import failure_in, failure_of_code
from kdist.restarts.progress import Progress


class End(enum.Enum):
    """How an attempt ended."""

    WELL = "success"
    STOPPED = "stopped"  # by a signal to `kdist run`
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One attempt of a job.

    Attributes:
        end: `End`.
        code: int, its exit code.
        began: float, in seconds since 1970.
        ended: float, the same.
        events: `Events`, what its ranks reported.
        failure: `Failure` or `None`, the cause of its end, if it failed and that is known.
        progress: `Progress` or `None`, by its backups; `None` without any.
        output: str or `None`, the directory of its ranks' output.
        hosts: tuple of str, the host of each rank, as `-H` or a hostfile names it; empty without these.
    """

    end: End
    code: int
    began: float
    ended: float
    events: Events
    failure: Failure | None = None
    progress: Progress | None = None
    output: str | None = None
    hosts: tuple[str, ...] = ()

    @property
    def cause(self) -> str:
        """The kind of its end, in one word."""
        if self.end is not End.FAILED:
            return self.end.value
        return self.failure.kind.value if self.failure is not None else "unknown"

    @property
    def is_preempted(self) -> bool:
        """Whether its ranks saved and left, as they were asked to."""
        return self.failure is not None and self.failure.kind in (Kind.PREEMPTION, Kind.RESIZE)

    @property
    def made_step(self) -> bool:
        """Whether it is known to have trained a step."""
        return self.events.made_step or (self.progress is not None and self.progress.steps > 0)


def cause(events: Events, code: int, launcher_says: str, host: str, host_of_rank: Sequence[str] = ()) -> Failure | None:
    """Returns why an attempt that did not end well has ended, or `None` if nothing tells.

    What a rank says of itself counts first, then what its launcher says of it, then what other ranks see of it.

    Args:
        events: `Events`, what was reported.
        code: int, the exit code.
        launcher_says: str, the end of the launcher's standard error.
        host: str, this host, if all ranks run on it, else empty.
        host_of_rank: sequence of str, the host of each rank, where it is known.
    """
    found = _first(events, code, launcher_says)
    if found is None or found.host or found.rank is None:
        return found
    known = dict(enumerate(host_of_rank)) | events.hosts
    return dataclasses.replace(found, host=known.get(found.rank, host))


def preemption_of(events: Events) -> Failure | None:
    """Returns the end of an attempt whose ranks have saved and left, `None` if they have not.

    Args:
        events: `Events`, what was reported.
    """
    return next((each for each in events.failures if each.kind in (Kind.PREEMPTION, Kind.RESIZE)), None)


def _first(events: Events, code: int, launcher_says: str) -> Failure | None:
    failures = events.failures
    if preempted := preemption_of(events):
        return preempted  # what came after it was saved does not matter
    lost = [each for each in failures if each.kind is Kind.LOST]
    seen_lost = {each.rank for each in lost}  # by others; of two that have lost each other neither exits by itself
    # A launcher also reports the code of a rank that has reported why, before or after it.
    own = [each for each in failures if not each.from_launcher]
    reported = {each.rank for each in own if each.kind is not Kind.LOST or len(seen_lost) > 1}
    for each in failures:
        is_known = each.from_launcher and each.kind is Kind.EXIT and each.rank in reported
        if not is_known and each.kind is not Kind.LOST and not each.is_consequence:
            return each
    said = failure_in(launcher_says)
    exited_by_itself = not failures or (said is not None and seen_lost == {said.rank} and said.rank not in reported)
    if said is not None and (said.kind is not Kind.EXIT or exited_by_itself):
        return said
    if lost:
        return lost[0]
    if by_code := failure_of_code(code):
        return by_code
    if failures:  # consequences alone
        return dataclasses.replace(failures[0], kind=Kind.LOST, rank=None, host="", text="a rank was lost")
    return said
