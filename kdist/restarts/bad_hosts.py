"""Hosts that are to blame for failures, and are left out for a while."""

from __future__ import annotations

from collections.abc import Sequence

from kdist.restarts.attempt import Attempt, End
from kdist.restarts.events import Kind
from kdist.restarts.rules import are_new, unproven_hosts

_LONGEST = 1800.0  # seconds that a host is left out


def left_out(attempts: Sequence[Attempt], now: float, first: float) -> dict[str, float]:
    """Returns the hosts that the next attempt should do without, each with the time from which it may be taken again.

    A host that takes part in a new checkpoint begins again.

    Args:
        attempts: sequence of `Attempt`, all so far.
        now: float, in seconds since 1970, as the result.
        first: float, seconds that a host is left out; twice as long each time.
    """
    times: dict[str, int] = {}
    until: dict[str, float] = {}
    for place, is_new in enumerate(are_new(attempts)):
        blamed = to_blame(attempts[: place + 1])
        for host in set(attempts[place].hosts) - blamed if is_new else ():
            times.pop(host, None)
            until.pop(host, None)
        for host in blamed:
            until[host] = attempts[place].ended + min(first * 2 ** times.get(host, 0), _LONGEST)
            times[host] = times.get(host, 0) + 1
    return {host: end for host, end in until.items() if end > now}


def to_blame(attempts: Sequence[Attempt]) -> set[str]:
    """Returns the hosts to blame for the end of the last attempt.

    A host that was lost is one, a host whose ranks fail twice in a row, and those with which the job does not start,
    if it did without them.

    Args:
        attempts: sequence of `Attempt`, all so far, at least one.
    """
    last = attempts[-1]
    if last.end is not End.FAILED or last.is_preempted or len(set(last.hosts)) < 2:
        return set()
    if not last.made_step and (unproven := unproven_hosts(attempts)):
        return unproven
    host = _host_of_failure(last)
    is_lost = last.failure is not None and last.failure.kind is Kind.LOST and last.failure.rank is None
    is_again = len(attempts) > 1 and _host_of_failure(attempts[-2]) == host
    return {host} if host and (is_lost or is_again) else set()


def _host_of_failure(attempt: Attempt) -> str:
    """Returns the host that a failure names, as `-H` names it, or an empty text."""
    failure, hosts = attempt.failure, attempt.hosts
    if failure is None:
        return ""
    if failure.rank is not None and failure.rank < len(hosts):
        return hosts[failure.rank]
    if failure.host in hosts:
        return failure.host
    # A launcher may name it as it names itself, and so do its ranks.
    ranks = [rank for rank, name in attempt.events.hosts.items() if name == failure.host and rank < len(hosts)]
    return hosts[ranks[0]] if ranks else ""
