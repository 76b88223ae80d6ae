"""The protocol of what has state: a name, a placement, and a state that can be saved and loaded."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

State = dict[str, Any]
"""By name: values that JSON can write, NumPy arrays, and `DeferredArray`."""


class DeferredArray:
    """An array of which each rank has a part: it is made when it is read, and only lives until it is written.

    Reading it, `numpy.asarray`, is collective: every rank must do it, in the same order.

    Args:
        make: callable that returns the array.
    """

    def __init__(self, make: Callable[[], npt.NDArray[Any]]) -> None:
        self._make = make

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Makes the array."""
        return np.asarray(self._make(), dtype)


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
