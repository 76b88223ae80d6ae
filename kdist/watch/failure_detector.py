"""The failure detector: from the reports of all ranks to nothing, a warning, or the end of the job."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from kdist.restarts.events import Kind

_GRACE = 3.0  # seconds that the launcher has to end the job by itself after a rank died
_SETTLED = 2.0  # seconds after which a rank that waits for an impossible collective is reported
_SKEW = 60.0  # seconds after which ranks in different collectives are not merely one step apart
_BUSY = 60.0  # seconds after a rank used the CPU or ended a batch, in which it counts as busy: its input may be slow
_IDLE = 2.0  # seconds without the CPU, after which a message calls a rank idle
_MAX_STATES = 3  # of ranks at fault that a sentence tells of

IN_A_GRAPH = "a collective of a graph"
"""What a rank waits in if no more is known of it, and the beginning of a text that has more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankReport:
    """What is known of one rank.

    Attributes:
        rank: int, its number.
        heartbeat_age: float, seconds since its last heartbeat.
        disconnected: bool, whether its connection has closed.
        finished: bool, whether its script has finished.
        calls: int, how many collectives it has begun.
        waiting: str or `None`, the collective that it waits in.
        place: str, the method that the user has called, and the line of the script; empty if unknown.
        among: tuple of int or `None`, the ranks that take part in that one; `None` for all.
        elapsed: float, seconds since it began that one, or finished the last one.
        idle: float, seconds since it last used the CPU, or ended a batch.
        in_user_code: bool, whether the user's code runs outside of Keras' loops, or in a callback.
        stack: tuple of str, the stack of its main thread, innermost frame last; empty if it was active just now.
        threads: tuple of str, the innermost frames of its other threads.
        has_failed: bool, whether it reports an error or an exit of its own.
        is_healing: bool, whether it has left its collectives, to go on without a rank that is gone.
    """

    rank: int
    heartbeat_age: float = 0.0
    disconnected: bool = False
    finished: bool = False
    calls: int = 0
    waiting: str | None = None
    place: str = ""
    among: tuple[int, ...] | None = None
    elapsed: float = 0.0
    idle: float = 0.0
    in_user_code: bool = False
    stack: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()
    has_failed: bool = False
    is_healing: bool = False


@dataclasses.dataclass(frozen=True)
class Failure:
    """A failure that was detected.

    Attributes:
        is_fatal: bool, whether the job must end; otherwise it is a warning.
        ranks: tuple of int, the ranks at fault.
        text: str, the message: received, expected, how to fix it.
        stacks: str, below it, the stacks of the ranks at fault; empty if unknown.
        is_of_all: bool, whether no rank is to blame more than the others.
        kind: `Kind`, what a supervisor makes of it.
    """

    is_fatal: bool
    ranks: tuple[int, ...]
    text: str
    kind: Kind = Kind.DISAGREEMENT
    stacks: str = ""
    is_of_all: bool = False


@dataclasses.dataclass(frozen=True)
class StallTimeout:
    """How long a rank may make no progress.

    Attributes:
        seconds: float or `None`, after which it has failed; `None` for never.
        is_strict: bool, whether that holds for ranks that are busy or in the user's code, too.
    """

    seconds: float | None = 600.0
    is_strict: bool = False


def detect_failure(reports: Sequence[RankReport], timeout: StallTimeout) -> Failure | None:
    """Detects a failure in the reports of all ranks.

    Args:
        reports: sequence of `RankReport`, one a rank.
        timeout: `StallTimeout`.

    Returns:
        A `Failure`, or `None` if there is none.
    """
    skew = _SKEW if timeout.seconds is None else min(timeout.seconds, _SKEW)
    return (
        _died(reports)
        or _finished_early(reports)
        or _mismatch(reports, skew)
        or _deadlock(reports, skew)
        or _stalled(reports, timeout)
        or _endless(reports, timeout)
        or _lost_at_exit(reports, timeout.seconds)
    )


def _died(reports: Sequence[RankReport]) -> Failure | None:
    dead = [each for each in reports if each.disconnected and not each.finished and each.heartbeat_age >= _GRACE]
    if not dead:
        return None
    silent = [each for each in dead if not each.has_failed]
    failed = [each for each in dead if each.has_failed]
    if not silent:  # in a terminal of its own, where no launcher has ended all
        return Failure(
            is_fatal=True,
            ranks=_ranks(dead),
            text=f"{_names(dead)} failed{_last_place(dead)}. Received: an error or an exit, which its own output "
            "names. Expected it to keep training. Fix: read its output.",
            kind=Kind.LOST,
        )
    others = f"; {_names(failed)} failed, as its own output says" if failed else ""
    return Failure(
        is_fatal=True,
        ranks=_ranks(silent + failed),
        text=f"{_names(silent)} died without an error message{_last_place(silent)}{others}. Received: a closed "
        "connection. Expected it to keep training. Fix: read its output and the system log of its host; the kernel "
        "kills processes that run out of memory.",
        kind=Kind.LOST,
    )


def _finished_early(reports: Sequence[RankReport]) -> Failure | None:
    waiting = _waiting(reports, _SETTLED)
    # A rank that has made the call which others still wait in may finish.
    early = [each for each in reports if each.finished and any(_waits_for(other, each) for other in waiting)]
    if not early:
        return None
    return Failure(
        is_fatal=True,
        ranks=_ranks(early),
        text=f"{_names(early)} has ended its script; {_names(waiting)} is in {_place(waiting[0])}. Received: an exit "
        "on some ranks only. Expected every rank to make the same calls. Fix: make that call on every rank: take it "
        "out of `if kdist.is_chief():`, or of another branch on the rank; or look for `sys.exit`.",
    )


def _waits_for(waiting: RankReport, finished: RankReport) -> bool:
    """Returns whether a rank waits in a call that a finished one has not made."""
    if waiting.among is None:
        return waiting.calls > finished.calls
    return finished.rank in waiting.among and waiting.elapsed >= _SKEW  # calls of groups are not counted


def _mismatch(reports: Sequence[RankReport], skew: float) -> Failure | None:
    # A rank without heartbeat may have sent its part of the call that the others have left.
    waiting = [each for each in _waiting(reports, _SETTLED) if each.heartbeat_age < _GRACE]
    for first in waiting:
        for other in waiting:
            if first.among is not None or other.among is not None:
                continue  # different groups make different calls
            same_number = first.calls == other.calls
            if same_number and not _differ(first, other):
                continue
            # A graph may have several collectives under way, which begin in another order on another rank.
            is_certain = same_number and not (_is_in_a_graph(first) and _is_in_a_graph(other))
            if is_certain or min(first.elapsed, other.elapsed) >= skew:
                return Failure(
                    is_fatal=True,
                    ranks=(first.rank, other.rank),
                    text=f"Ranks make different calls. Received: {_call(first, other)}; {_call(other, first)}. "
                    "Expected the same call with the same tensors on every rank. Fix: look for a branch, a shape or a "
                    "number of steps that depends on the rank.",
                    stacks=_stacks([first, other]),
                )
    return None


def _deadlock(reports: Sequence[RankReport], skew: float) -> Failure | None:
    """All ranks wait, one of them in a call of a group of which another rank waits elsewhere."""
    running = [each for each in reports if not each.finished]
    if any(each.waiting is None or each.elapsed < skew or each.heartbeat_age >= _GRACE for each in running):
        return None
    for first in running:
        for other in running:
            if first.among is not None and other.rank in first.among and other.waiting != first.waiting:
                return Failure(
                    is_fatal=True,
                    ranks=(first.rank, other.rank),
                    text=f"All ranks wait for each other. Received: {_call(first, first)}; {_call(other, other)}. "
                    "Expected both in one collective, or one to send what the other receives. Fix: let the ranks of a "
                    "group make the same calls in the same order, and send before they receive.",
                    stacks=_stacks([first, other]),
                )
    return None


def _differ(first: RankReport, other: RankReport) -> bool:
    """Returns whether two ranks are known to wait in different collectives."""
    is_unknown = IN_A_GRAPH in (first.waiting, other.waiting) and _is_in_a_graph(first) and _is_in_a_graph(other)
    return first.waiting != other.waiting and not is_unknown


def _is_in_a_graph(report: RankReport) -> bool:
    return report.waiting is not None and report.waiting.startswith(IN_A_GRAPH)


def _stalled(reports: Sequence[RankReport], timeout: StallTimeout) -> Failure | None:
    stall_timeout, is_strict = timeout.seconds, timeout.is_strict
    if stall_timeout is None:
        return None
    half = stall_timeout / 2
    missing = [
        each
        for each in reports
        if not each.finished and (each.heartbeat_age if each.waiting else each.elapsed + each.heartbeat_age) >= half
    ]
    others = [each for each in _waiting(reports, half) if each not in missing]
    if not missing or not others:
        return None
    seconds = min(max(each.elapsed for each in others), max(each.elapsed + each.heartbeat_age for each in missing))
    stuck = [
        each
        for each in missing
        if is_strict or _has_no_heartbeat(each, stall_timeout) or (each.idle >= _BUSY and not each.in_user_code)
    ]
    fatal = seconds >= stall_timeout and bool(stuck)
    at_fault = stuck if fatal else missing
    states = _states(at_fault, functools.partial(_state, stall_timeout=stall_timeout))
    return Failure(
        is_fatal=fatal,
        ranks=_ranks(at_fault),
        text=f"{states}; {_names(others)} waits in {_place(others[0])} for {seconds:.0f} s. "
        f"Received: no call of {len(at_fault)} of {len(reports)} ranks. Expected every rank to arrive within "
        f"stall_timeout={stall_timeout:g} s. Fix: {'remove' if fatal else 'check'} what blocks it; "
        "kdist.scope(stall_timeout=...) allows more time, None any time.",
        kind=Kind.STALL,
        stacks=_stacks(at_fault),
    )


def _endless(reports: Sequence[RankReport], timeout: StallTimeout) -> Failure | None:
    """All ranks are in one collective, which does not end."""
    running = [each for each in reports if not each.finished]
    # Another rank than the first knows of itself and of rank 0 only.
    if timeout.seconds is None or len(running) < 2 or len({each.calls for each in running}) > 1:
        return None
    if any(each.among is not None for each in running) or len(_waiting(running, timeout.seconds)) < len(running):
        return None
    first = running[0]
    limit = "allows more time, None any time" if timeout.is_strict else "ends such a job, None allows any time"
    return Failure(
        is_fatal=timeout.is_strict,
        ranks=_ranks(running),
        text=f"All ranks are in one call for {min(each.elapsed for each in running):.0f} s. Received: "
        f"{_call(first, first)}, and the others, too. Expected it to end within stall_timeout={timeout.seconds:g} s. "
        "Fix: look for a failure of the network, of the GPUs or in the MPI library; "
        f"kdist.scope(stall_timeout={'...' if timeout.is_strict else 'SECONDS'}) {limit}.",
        kind=Kind.STALL,
        stacks=_stacks([first]),
        is_of_all=True,
    )


def _lost_at_exit(reports: Sequence[RankReport], stall_timeout: float | None) -> Failure | None:
    """Finished ranks wait for the others without a collective, as long as one of these sends heartbeats."""
    left = [each for each in reports if not each.finished]
    if stall_timeout is None or not left or len(left) == len(reports):
        return None
    if min(each.heartbeat_age for each in left) < stall_timeout:
        return None
    finished = [each for each in reports if each.finished]
    return Failure(
        is_fatal=True,
        ranks=_ranks(left),
        text=f"{_states(left, _no_heartbeat)}; {_names(finished)} has finished and waits at exit. Received: no "
        f"heartbeat of {len(left)} of {len(reports)} ranks. Expected one within stall_timeout={stall_timeout:g} s. "
        "Fix: check its host, and what its script does at the end; kdist.scope(stall_timeout=...) allows more time, "
        "None any time.",
        kind=Kind.STALL,
    )


def _waiting(reports: Sequence[RankReport], seconds: float) -> list[RankReport]:
    # The others need not make the call that a finished rank waits in.
    return [each for each in reports if each.waiting is not None and not each.finished and each.elapsed >= seconds]


def _has_no_heartbeat(report: RankReport, stall_timeout: float) -> bool:
    return report.heartbeat_age > max(_GRACE, min(report.elapsed / 2, stall_timeout))


def _states(reports: Sequence[RankReport], described: Callable[[RankReport], str]) -> str:
    """Returns what ranks at fault do. A report begins with it: of the first of them `kdist run` names the output."""
    more = [f"{len(reports) - _MAX_STATES} other ranks do not arrive"] if len(reports) > _MAX_STATES else []
    return "; ".join([*map(described, reports[:_MAX_STATES]), *more])


def _state(report: RankReport, stall_timeout: float) -> str:
    if _has_no_heartbeat(report, stall_timeout):
        return _no_heartbeat(report)
    cpu = "uses the CPU" if report.idle < _IDLE else "is idle"
    place = f" in {report.place}" if report.place else f" at {report.stack[-1]}" if report.stack else ", stack unknown"
    return f"rank {report.rank} makes no collective for {report.elapsed:.0f} s and {cpu}{place}"


def _no_heartbeat(report: RankReport) -> str:
    return f"rank {report.rank} sends no heartbeat for {report.heartbeat_age:.0f} s: it or its host is stopped"


def _call(report: RankReport, other: RankReport) -> str:
    """Returns what a rank waits in; the collective, too, where the other rank is at the same place."""
    if report.place and other.place and report.place != other.place:
        return f"rank {report.rank} is in {report.place}"
    place = f"{report.place}, in " if report.place else ""
    return f"rank {report.rank} is in {place}its call {report.calls}, {report.waiting}"


def _place(report: RankReport) -> str:
    return report.place or str(report.waiting)


def _last_place(reports: Sequence[RankReport]) -> str:
    return f", in {reports[0].place}" if reports[0].place else ""


def _names(reports: Sequence[RankReport]) -> str:
    return ("rank " if len(reports) == 1 else "each of ranks ") + ", ".join(str(each.rank) for each in reports)


def _ranks(reports: Sequence[RankReport]) -> tuple[int, ...]:
    return tuple(each.rank for each in reports)


def _stacks(reports: Sequence[RankReport]) -> str:
    """Returns the stacks of the main threads, innermost frames last, and the frames of the others."""
    lines = []
    for each in reports:
        if each.stack:
            lines += [f"rank {each.rank}'s main thread (most recent call last):", *each.stack]
        if each.threads:
            lines += [f"rank {each.rank}'s other threads:", *each.threads]
    return "".join(f"\n  {line}" for line in lines)
