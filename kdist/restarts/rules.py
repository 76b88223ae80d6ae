"""Whether a job is started again after its last attempt."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kdist.restarts.attempt import Attempt, End
from kdist.restarts.events import Kind
from kdist.restarts.progress import Progress

_MAX_WITHOUT_CHECKPOINT = 2  # attempts

ASKED_TO_END = "kdist run was asked to end"
"""Why no attempt follows one that would be made again."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether a job is started again.

    Attributes:
        again: bool.
        why: str, the reason if it is not, in words; empty if none is needed.
        left: int, the restarts that are left after this one.
    """

    again: bool
    why: str = ""
    left: int = 0


def decide(attempts: Sequence[Attempt], restarts: int) -> Decision:
    """Returns whether a job is started again.

    Args:
        attempts: sequence of `Attempt`, all so far, at least one.
        restarts: int, how many restarts are allowed without a new checkpoint between them.

    Returns:
        A `Decision`.
    """
    left = restarts - _num_used(attempts)
    if attempts[-1].end is End.WELL:
        return Decision(False)
    if attempts[-1].is_preempted:
        return Decision(True, left=left)
    if why := _why_not(attempts):
        return Decision(False, why)
    if left < 1:
        each = "the restart has" if restarts == 1 else f"all {restarts} restarts have"
        return Decision(False, f"{each} been used since the last new checkpoint")
    return Decision(True, left=left - 1)


def are_new(attempts: Sequence[Attempt]) -> list[bool]:
    """Returns for each attempt whether it wrote a checkpoint that is further than all of those before.

    It is if it lies later in the script, or if the attempt went on from the newest one. On another number of ranks a
    step has other rows, and a script that leaves out what it has done counts its calls of `fit` again.

    Args:
        attempts: sequence of `Attempt`.
    """
    furthest, newest, found = (0, 0, 0), 0, []
    for each in attempts:
        now = each.progress or Progress()
        goes_on = 0 < newest <= now.resumed < now.number
        found.append(now.place > furthest or goes_on)
        furthest, newest = max(now.place, furthest), max(now.number, newest)
    return found


def unproven_hosts(attempts: Sequence[Attempt]) -> set[str]:
    """Returns the hosts of the last attempt without which the job has trained a step most recently.

    Args:
        attempts: sequence of `Attempt`, all so far, at least one.
    """
    proven = next((each for each in reversed(attempts[:-1]) if each.made_step), None)
    return set() if proven is None else set(attempts[-1].hosts) - set(proven.hosts)


def _why_not(attempts: Sequence[Attempt]) -> str:
    last = attempts[-1]
    failure = last.failure
    if last.end is End.STOPPED:
        return ASKED_TO_END
    if last.events.has_ended:
        return "the script of rank 0 had ended"
    if failure is not None and failure.kind is Kind.EXIT:
        return "the script chose to exit"
    if failure is not None and (failure.comes_again or failure.kind is Kind.DISAGREEMENT):
        return "it would fail in the same way again"
    if not any(each.events.hosts for each in attempts):
        return "the start failed: no rank entered kdist.scope()"
    if failure is None or failure.kind is Kind.EXCEPTION:
        if not last.made_step and not unproven_hosts(attempts):
            return "the start failed: no step was trained"
        if len(attempts) > 1 and _raised(attempts[-2]) and _raised(last) and not are_new(attempts)[-1]:
            return "it was raised twice, without a new checkpoint between"
    if not any(_news(attempts)[-_MAX_WITHOUT_CHECKPOINT:]) and len(_news(attempts)) >= _MAX_WITHOUT_CHECKPOINT:
        return f"{_MAX_WITHOUT_CHECKPOINT} attempts have made no new checkpoint of BackupAndRestore"
    return ""


def _raised(attempt: Attempt) -> bool:
    return attempt.failure is not None and attempt.failure.kind is Kind.EXCEPTION


def _news(attempts: Sequence[Attempt]) -> list[bool]:
    """Returns `are_new` without the attempts that were preempted, which count for nothing."""
    return [is_new for each, is_new in zip(attempts, are_new(attempts), strict=True) if is_new or not each.is_preempted]


def _num_used(attempts: Sequence[Attempt]) -> int:
    """Returns how many restarts were used since the last attempt that made a new checkpoint."""
    used = 0
    for place, is_new in enumerate(are_new(attempts)):
        if is_new:
            used = 0
        # The last attempt's restart is not yet decided.
        if place < len(attempts) - 1 and not attempts[place].is_preempted:
            used += 1
    return used
