"""The protocol of what has state: a name, a placement, and a state that can be saved and loaded."""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping
from typing import Any

State = dict[str, Any]
"""By name: values that JSON can write, and NumPy arrays."""


class Placement(enum.Enum):
    """Where a part of the state lives."""

    WHOLE = "whole"
    """All of it on every rank, equal."""
    PER_RANK = "per rank"
    """Each rank has its own: the saved arrays hold those of all ranks."""


class StatePart(abc.ABC):
    """A part of a training's state. Backup, resume, broadcast and comparison use the list of a session's parts.

    Attributes:
        name: str, unique in a session; the same in every process.
        placement: `Placement`.
    """

    name: str
    placement = Placement.WHOLE

    def variables(self) -> list[Any]:
        """Returns the variables that ranks compare and broadcast, if the placement is `WHOLE`."""
        return []

    @abc.abstractmethod
    def state_dict(self) -> State:
        """Returns the state.

        Collective: every rank must call this, in the same order.
        """

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` has returned, on any number of ranks; an empty mapping resets.

        Collective: every rank must call this, in the same order.
        """
