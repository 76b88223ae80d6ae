"""The supervisor: it makes attempts until one needs no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kdist.restarts.attempt import Attempt, End
from kdist.restarts.rules import ASKED_TO_END, Decision, decide
from kdist.restarts.summary import blamed


def supervise(
    start: Callable[[Sequence[Attempt]], Attempt | str],
    restarts: int,
    *,
    say: Callable[[str], object],
    keep: Callable[[Sequence[Attempt], str], object],
    is_stopped: Callable[[], bool],
) -> tuple[list[Attempt], str]:
    """Makes attempts of a job until one ends well, or no other may follow.

    Args:
        start: function of the attempts so far that makes the next one, and returns it when no process of it is left,
            or returns why it cannot be made.
        restarts: int, how many restarts are allowed without a new checkpoint between them.
        say: function of a line for the user.
        keep: function of the attempts so far and of the reason to end, which stores them after each attempt.
        is_stopped: function that returns whether a signal has asked to end, between two attempts too.

    Returns:
        The attempts, and why no other followed; that is empty if the last one ended well.
    """
    attempts: list[Attempt] = []
    has_warned = False
    while True:
        last = start(attempts)
        if isinstance(last, str):
            keep(attempts, last)
            return attempts, last
        attempts.append(last)
        decision = decide(attempts, restarts)
        if decision.again and is_stopped():
            decision = Decision(False, ASKED_TO_END)
        keep(attempts, decision.why)
        if not decision.again:
            return attempts, decision.why
        has_no_backup = last.made_step and all(each.progress is None for each in attempts)
        if last.end is End.FAILED and has_no_backup and not has_warned:
            has_warned = True
            say(
                "no backup was made: the training starts from its beginning. Fix: to resume it, "
                'fit(callbacks=[kdist.callbacks.BackupAndRestore("DIRECTORY")])'
            )
        number = len(attempts) + 1
        left = "not counted" if last.is_preempted else f"restarts left until a new checkpoint: {decision.left}"
        say(f"{blamed(last)}; the job is started again, attempt {number} ({left})")
