"""Which hosts an attempt takes, and how many ranks it has, between a least and a greatest number."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from kdist.launchers.hosts import Host


@dataclasses.dataclass(frozen=True)
class Placement:
    """The hosts of an attempt.

    Attributes:
        hosts: tuple of `Host`, in order, with as many slots as there are ranks on each.
    """

    hosts: tuple[Host, ...]

    @property
    def np(self) -> int:
        """The number of ranks."""
        return sum(host.slots for host in self.hosts)

    @property
    def host_of_rank(self) -> tuple[str, ...]:
        """The name of each rank's host: launchers fill one host after the other."""
        return tuple(host.name for host in self.hosts for _ in range(host.slots))

    def __str__(self) -> str:
        return ",".join(map(str, self.hosts))


def place(
    hosts: Sequence[Host], answering: Collection[str], left_out: Collection[str], min_np: int, max_np: int
) -> Placement | None:
    """Returns where the ranks of an attempt run, or `None` if there are too few slots.

    Args:
        hosts: sequence of `Host`, all of the job, in the order in which they are taken.
        answering: collection of str, the names of those that answer.
        left_out: collection of str, the names of those that are taken only if there are too few ranks without them.
        min_np: int, the least number of ranks.
        max_np: int, the greatest.
    """
    answer = [host for host in hosts if host.name in answering]
    for taken in ([host for host in answer if host.name not in left_out], answer):
        placement = _filled(taken, max_np)
        if placement.np >= min_np:
            return placement
    return None


def _filled(hosts: Iterable[Host], max_np: int) -> Placement:
    found, left = [], max_np
    for host in hosts:
        if left > 0:
            found.append(Host(host.name, min(host.slots, left)))
            left -= found[-1].slots
    return Placement(tuple(found))
