"""Healing: ranks whose peer was killed go on in their processes. What a process keeps of it, without MPI."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

LEAST = 2
"""The fewest ranks that go on by default: a last one would train by Keras' own code, whose input order is another."""


@dataclasses.dataclass(frozen=True)
class ShrinkResult:
    """What is left of the ranks of a communicator.

    Attributes:
        communicator: that of the survivors, in their order.
        rank: int, this process's number among them.
        size: int, how many they are.
        lost: tuple of int, the ranks that are gone, as they were numbered until now.
        lost_first: tuple of int, all that were lost so far, as the launcher numbers them.
        why_not: str, why one of the survivors cannot go on; empty if all can.
    """

    communicator: Any
    rank: int
    size: int
    lost: tuple[int, ...]
    lost_first: tuple[int, ...]
    why_not: str


class Peers(Protocol):
    """The other ranks, as the engine sees them."""

    is_broken: bool  # whether a collective of this process has failed, because a peer is gone

    def has_lost(self) -> bool:
        """Returns whether a peer is known to be gone; any thread may ask."""

    def shrink(self, why_not: str) -> ShrinkResult:
        """Returns who is left, once all of them ask; `why_not` says why this process cannot go on."""

    def abort(self, code: int) -> NoReturn:
        """Ends all processes."""


class _Watch(Protocol):
    def pause(self) -> None: ...

    def close(self) -> None: ...


@dataclasses.dataclass
class OwnHealing:
    """What this process keeps for healing; nothing, unless it is a rank of `kdist run --heal in-process`.

    Attributes:
        is_on: bool, whether the script is run again on the ranks that are left.
        communicator: over which the next engine is opened; `None` for all processes that the launcher started.
        peers: `Peers` or `None`, of the engine that is open, or opened now.
        heartbeat: what watches them, with `pause` and `close`, or `None`.
        closing: list of functions that are called before the script is run again, to forget the engine.
    """

    is_on: bool = False
    communicator: Any = None
    peers: Peers | None = None
    heartbeat: _Watch | None = None
    closing: list[Callable[[], object]] = dataclasses.field(default_factory=list)

    @property
    def is_broken(self) -> bool:
        """Whether a collective has failed, because a peer is gone."""
        return self.peers is not None and self.peers.is_broken

    def has_lost(self) -> bool:
        """Returns whether a peer is known to be gone."""
        return self.peers is not None and self.peers.has_lost()

    def close(self) -> None:
        """Closes what belongs to the ranks of before."""
        for close in self.closing:
            close()
        self.closing.clear()
        if self.heartbeat is not None:
            self.heartbeat.close()
        self.peers = self.heartbeat = None


own_healing = OwnHealing()
"""That of this process."""
