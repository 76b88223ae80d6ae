"""What all attempts of a job came to, in words and as values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdist.restarts.attempt import Attempt, End
from kdist.restarts.events import Healing, Kind
from kdist.restarts.rules import are_new

# What the other ranks see of a rank is told at length by them.
_OF_WATCH = {
    Kind.STALL: "made no progress for stall_timeout",
    Kind.LOST: "was lost, for an unknown reason",
    Kind.DISAGREEMENT: "did not agree with the other ranks",
}


def blamed(attempt: Attempt) -> str:
    """Returns who failed, and how, in one line.

    Args:
        attempt: `Attempt`.
    """
    if attempt.end is End.WELL:
        return "it ended well"
    if attempt.end is End.STOPPED:
        return "it was stopped"
    failure = attempt.failure
    if failure is None:
        return f"it ended with code {attempt.code}, for an unknown reason"
    text = failure.text.strip().split("\n", 1)[0]
    if failure.rank is None:
        return text
    host = f" on host {failure.host}" if failure.host else ""
    return f"rank {failure.rank}{host} {_OF_WATCH.get(failure.kind, text)}"


def steps_lost(attempt: Attempt) -> int | None:
    """Returns how many steps were trained after the last checkpoint; `None` without a backup.

    Args:
        attempt: `Attempt`.
    """
    if attempt.end is End.WELL or not attempt.made_step:
        return 0
    if attempt.progress is None:
        return None
    return attempt.progress.steps - attempt.progress.saved_steps


def seconds_lost(attempts: Sequence[Attempt], place: int) -> float:
    """Returns the time since an attempt's last checkpoint, and until the next attempt's first step.

    Args:
        attempts: sequence of `Attempt`, all of them.
        place: int, the index of the attempt.
    """
    attempt = attempts[place]
    if attempt.end is End.WELL:
        return 0.0
    saved = attempt.progress.last_save if attempt.progress is not None else 0.0
    lost = attempt.ended - (saved or attempt.began)
    if place + 1 < len(attempts):
        progress = attempts[place + 1].progress
        # Without a first step all of the next attempt is lost, and counted there.
        begins = attempts[place + 1].began if progress is None else progress.first_step
        lost += max(0.0, (begins or attempts[place + 1].began) - attempt.ended)
    return lost


def _healing_values(attempts: Sequence[Attempt]) -> list[list[dict[str, Any]]]:
    """Returns what each attempt's healings cost, as values."""
    return [
        [
            {
                "ranks_lost": list(each.lost),
                "ranks_left": each.ranks,
                "host": each.host,
                "cause": Kind.SIGNAL.value,
                "steps_lost": each.steps_lost,
                "seconds_lost": round(_seconds_of(each, attempt), 3),
            }
            for each in attempt.events.healings
        ]
        for attempt in attempts
    ]


def _seconds_of(healing: Healing, attempt: Attempt) -> float:
    """Returns the time since the last checkpoint before a healing, and until the next step."""
    return (healing.went_on or healing.began) - (healing.saved or attempt.began)


def in_words(attempts: Sequence[Attempt], why: str) -> str:
    """Returns the summary for the user; empty after one attempt that ended well, and lost no rank.

    Args:
        attempts: sequence of `Attempt`, all of them.
        why: str, why no other followed.
    """
    last = attempts[-1]
    if last.end is End.WELL and len(attempts) == 1 and not last.events.healings:
        return ""
    well = "the last one ended well" if len(attempts) > 1 else "which ended well"
    how = well if last.end is End.WELL else f"exit code {last.code}; not started again: {why}"
    lines = [f"{len(attempts)} attempt{'s' if len(attempts) > 1 else ''}, {how}"]
    are_resized = len({len(each.hosts) for each in attempts}) > 1
    for place, each in enumerate(attempts):
        for healing in each.events.healings:
            cost = f"lost {_in_words(healing.steps_lost)} and {_seconds_of(healing, each):.0f} s"
            lines.append(f"  attempt {place + 1}: {healing.text}; {cost}")
        if each.end is End.WELL:
            continue
        lost = _in_words(steps_lost(each))
        size = f", of {len(each.hosts)} rank{'s' if len(each.hosts) > 1 else ''}" if are_resized else ""
        what = f"{blamed(each)}; lost {lost} and {seconds_lost(attempts, place):.0f} s"
        lines.append(f"  attempt {place + 1}{size}: {what}")
    return "\n".join(lines)


def _in_words(steps: int | None) -> str:
    return "all steps, without a backup," if steps is None else f"{steps} step{'s' * (steps != 1)}"


def as_values(attempts: Sequence[Attempt], why: str, restarts: int) -> dict[str, Any]:
    """Returns the same for JSON.

    Args:
        attempts: sequence of `Attempt`, all so far.
        why: str, why no other followed.
        restarts: int, how many restarts were allowed.
    """
    all_steps = [steps_lost(each) for each in attempts]
    news, healings = are_new(attempts), _healing_values(attempts)
    healed = [each for attempt in healings for each in attempt]
    counted = [*all_steps, *(each["steps_lost"] for each in healed)]
    seconds = [seconds_lost(attempts, place) for place in range(len(attempts))]
    seconds += [each["seconds_lost"] for each in healed]
    return {
        "restarts": restarts,
        "exit_code": attempts[-1].code,
        "why_it_ended": why,
        "steps_lost": None if None in counted else sum(steps or 0 for steps in counted),
        "seconds_lost": round(sum(seconds), 3),
        "attempts": [
            {
                "attempt": place + 1,
                "ranks": len(each.hosts) or None,
                "hosts": list(dict.fromkeys(each.hosts)),
                "cause": each.cause,
                "rank": None if each.failure is None else each.failure.rank,
                "host": None if each.failure is None else each.failure.host or None,
                "message": "" if each.failure is None else each.failure.text,
                "exit_code": each.code,
                "began": round(each.began, 3),
                "seconds": round(each.ended - each.began, 3),
                "new_checkpoint": news[place],
                "steps": None if each.progress is None else each.progress.steps,
                "steps_lost": all_steps[place],
                "seconds_lost": round(seconds_lost(attempts, place), 3),
                "healings": healings[place],
                "output": each.output,
            }
            for place, each in enumerate(attempts)
        ],
    }
