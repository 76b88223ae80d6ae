"""From what all ranks say of themselves to what must be done: nothing, a warning, or the end of the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

_GONE = 3.0  # seconds that the launcher gets to end the job by itself when a rank has died
_SURE = 2.0  # seconds after which ranks that wait for what cannot come are not about to go on
_APART = 60.0  # seconds after which ranks in different calls are not merely one ahead of the other

IN_A_GRAPH = "a collective of a graph"
"""What a rank waits in, and how a text begins that says more of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sign:
    """What is known of one rank.

    Attributes:
        rank: int, its number.
        silent: float, seconds since it last said something.
        gone: bool, whether its connection has closed.
        ended: bool, whether its script is through.
        calls: int, how many collectives it has begun.
        waiting: str or `None`, the collective that it is in.
        since: float, seconds since it began that one, or ended the last one.
        busy: bool, whether it computes.
        own_code: bool, whether the user's own code runs outside of Keras' loops, or in a callback.
        stack: tuple of str, where its main thread is, the innermost frame last; empty if it has just been active.
        threads: tuple of str, where its other threads are.
    """

    rank: int
    silent: float = 0.0
    gone: bool = False
    ended: bool = False
    calls: int = 0
    waiting: str | None = None
    since: float = 0.0
    busy: bool = False
    own_code: bool = False
    stack: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What must be done.

    Attributes:
        is_fatal: bool, whether the job must end; otherwise it is a warning.
        ranks: tuple of int, those that are to blame.
        text: str, what to say: received, expected, how to fix it.
    """

    is_fatal: bool
    ranks: tuple[int, ...]
    text: str


def judge(signs: Sequence[Sign], stall_timeout: float | None, *, is_strict: bool) -> Verdict | None:
    """Decides from the signs of all ranks.

    Args:
        signs: sequence of `Sign`, one a rank.
        stall_timeout: float or `None`, seconds after which a rank that makes no progress is given up; `None` for never.
        is_strict: bool, whether that holds for ranks that are busy or in the user's own code, too.

    Returns:
        A `Verdict`, or `None` if all is well.
    """
    return (
        _gone(signs)
        or _ended(signs)
        or _mismatch(signs, _APART if stall_timeout is None else min(stall_timeout, _APART))
        or _stall(signs, stall_timeout, is_strict)
        or _silent_at_the_end(signs, stall_timeout)
    )


def _gone(signs: Sequence[Sign]) -> Verdict | None:
    gone = [sign for sign in signs if sign.gone and not sign.ended and sign.silent >= _GONE]
    if not gone:
        return None
    return Verdict(
        True,
        _ranks(gone),
        f"{_named(gone)} has died without a word. Received: a closed connection. Expected it to train on. "
        "Fix: look into its output and its host's log; the kernel kills what needs more memory than there is.",
    )


def _ended(signs: Sequence[Sign]) -> Verdict | None:
    waiting = _waiting(signs, _SURE)
    # One that has ended after the call that others are still in was there.
    ended = [sign for sign in signs if sign.ended and any(other.calls > sign.calls for other in waiting)]
    if not ended:
        return None
    return Verdict(
        True,
        _ranks(ended),
        f"{_named(waiting)} waits in {waiting[0].waiting} for {_named(ended)}, which has ended its script. Received: "
        "an end on some ranks only. Expected every rank to make the same calls. Fix: look for `sys.exit`, or for a "
        "branch on the rank around fit, evaluate or predict.",
    )


def _mismatch(signs: Sequence[Sign], apart: float) -> Verdict | None:
    for first in _waiting(signs, _SURE):
        for other in _waiting(signs, _SURE):
            same_number = first.calls == other.calls
            if same_number and not _differ(first, other):
                continue
            # A graph may have several under way, which begin in another order on another rank.
            is_certain = same_number and not (_is_in_a_graph(first) and _is_in_a_graph(other))
            if is_certain or min(first.since, other.since) >= apart:
                return Verdict(
                    True,
                    (first.rank, other.rank),
                    f"Ranks wait in different collectives. Received: {_call(first)}, and {_call(other)}. Expected the "
                    "same call with the same tensors on every rank. Fix: look for a branch, a shape or a number of "
                    f"steps that depends on the rank.{_stacks([first, other])}",
                )
    return None


def _differ(first: Sign, other: Sign) -> bool:
    """Returns whether two ranks are known to wait in different collectives."""
    is_vague = IN_A_GRAPH in (first.waiting, other.waiting) and _is_in_a_graph(first) and _is_in_a_graph(other)
    return first.waiting != other.waiting and not is_vague


def _is_in_a_graph(sign: Sign) -> bool:
    return sign.waiting is not None and sign.waiting.startswith(IN_A_GRAPH)


def _stall(signs: Sequence[Sign], stall_timeout: float | None, is_strict: bool) -> Verdict | None:
    if stall_timeout is None:
        return None
    waiting = _waiting(signs, stall_timeout / 2)
    missing = [
        sign
        for sign in signs
        if sign.waiting is None and not sign.ended and sign.since + sign.silent >= stall_timeout / 2
    ] + [sign for sign in signs if sign.waiting and not sign.ended and sign.silent >= stall_timeout / 2]
    others = [sign for sign in waiting if sign not in missing]
    if not missing or not others:
        return None
    seconds = min(max(sign.since for sign in others), max(sign.since + sign.silent for sign in missing))
    hopeless = [sign for sign in missing if is_strict or _is_silent(sign) or not (sign.busy or sign.own_code)]
    fatal = seconds >= stall_timeout and bool(hopeless)
    blamed = hopeless if fatal else missing
    return Verdict(
        fatal,
        _ranks(blamed),
        f"{_named(others)} waits in {others[0].waiting} for {seconds:.0f} s. Received: "
        f"{'; '.join(_why(sign) for sign in blamed)}. Expected every rank there within stall_timeout={stall_timeout:g} "
        f"s. Fix: {'mend' if fatal else 'look at'} what keeps it; kdist.scope(stall_timeout=...) gives it more time, "
        f"None without end.{_stacks(blamed)}",
    )


def _silent_at_the_end(signs: Sequence[Sign], stall_timeout: float | None) -> Verdict | None:
    """Ranks that have ended wait for the others without a collective, as long as these give signs of life."""
    left = [sign for sign in signs if not sign.ended]
    if stall_timeout is None or not left or len(left) == len(signs):
        return None
    if min(sign.silent for sign in left) < stall_timeout:
        return None
    ended = [sign for sign in signs if sign.ended]
    return Verdict(
        True,
        _ranks(left),
        f"{_named(ended)} has ended and waits at its exit. Received: {'; '.join(map(_no_sign, left))}. Expected "
        f"a sign within stall_timeout={stall_timeout:g} s. Fix: look at its host, and at what its script does at the "
        "end; kdist.scope(stall_timeout=...) gives it more time, None without end.",
    )


def _waiting(signs: Sequence[Sign], seconds: float) -> list[Sign]:
    # What ranks wait in at their exit is no call that the others must make now.
    return [sign for sign in signs if sign.waiting is not None and not sign.ended and sign.since >= seconds]


def _is_silent(sign: Sign) -> bool:
    return sign.silent > sign.since / 2 and sign.silent > _GONE


def _why(sign: Sign) -> str:
    if _is_silent(sign):
        return _no_sign(sign)
    state = "computes" if sign.busy else "does not compute"
    place = f" at {sign.stack[-1]}" if sign.stack else " nobody knows where"
    return f"rank {sign.rank} is elsewhere for {sign.since:.0f} s and {state},{place}"


def _no_sign(sign: Sign) -> str:
    return f"rank {sign.rank} gives no sign for {sign.silent:.0f} s: it is stopped, or its host is"


def _call(sign: Sign) -> str:
    return f"rank {sign.rank} in its call {sign.calls}, {sign.waiting}"


def _named(signs: Sequence[Sign]) -> str:
    return ("rank " if len(signs) == 1 else "each of ranks ") + ", ".join(str(sign.rank) for sign in signs)


def _ranks(signs: Sequence[Sign]) -> tuple[int, ...]:
    return tuple(sign.rank for sign in signs)


def _stacks(signs: Sequence[Sign]) -> str:
    """Returns where the main threads are, the innermost frames last."""
    lines = []
    for sign in signs:
        if sign.stack:
            lines += [f"rank {sign.rank}'s main thread (most recent call last):", *sign.stack]
        if sign.threads:
            lines += [f"rank {sign.rank}'s other threads:", *sign.threads]
    return "".join(f"\n  {line}" for line in lines)
