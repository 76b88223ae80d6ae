"""The protocol of what has state: a name, a placement, and a state that can be saved and loaded."""

from __future__ import annotations

import abc
import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

State = dict[str, Any]
"""By name: values that JSON can write, NumPy arrays, and `DeferredArray`."""


BLOCK = 1 << 22
"""Bytes of the rows of an array that are made at a time."""

MODEL = "model"
"""The name of the part that is a model: it is large, and is read variable by variable."""


class DeferredArray:
    """An array that is made when it is read, block by block: one of which each rank has a part, or one in a file.

    Reading it, by `blocks` or `numpy.asarray`, is collective: every rank must do it, in the same order.

    Args:
        shape: sequence of ints.
        dtype: NumPy dtype.
        make: callable that takes the ranks that receive the array, `None` for all, and yields arrays, consecutive rows
            of it; one of one row if the array has no dimensions. On the other ranks they have no rows.

    Attributes:
        shape: tuple of ints.
        dtype: NumPy dtype.
        nbytes: int, the size of the whole array.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        make: Callable[[Sequence[int] | None], Iterable[npt.NDArray[Any]]],
    ) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self._make = make

    def blocks(self, receivers: Sequence[int] | None = None) -> Iterator[npt.NDArray[Any]]:
        """Yields blocks of rows.

        Collective: every rank must iterate over this to the end, in the same order.

        Args:
            receivers: sequence of ints, the ranks that get them; by default all.
        """
        yield from self._make(receivers)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Makes the array on all ranks."""
        whole = np.empty(self.shape or (1,), self.dtype)
        start = 0
        for block in self.blocks():
            whole[start : start + len(block)] = block
            start += len(block)
        return np.asarray(whole.reshape(self.shape), dtype)


def rows_of_block(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Returns how many rows of an array a block has."""
    return max(1, BLOCK // max(1, math.prod(shape[1:]) * dtype.itemsize))


class Placement(enum.Enum):
    """Where a part of the state lives."""

    WHOLE = "whole"
    """All of it on every rank, equal."""
    PER_RANK = "per rank"
    """Each rank has its own: the saved arrays hold those of all ranks."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a resumed training begins in its data.

    Attributes:
        epoch_step: int, the steps of the epoch that are made.
        description: str, for the log.
        change: str, how another number of ranks changes it, for the log.
    """

    epoch_step: int
    description: str
    change: str = "batch, learning rate and position in the data are converted"


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

    @property
    def is_in_parts(self) -> bool:
        """Whether each rank has its part of some variables: what is saved of them is a `DeferredArray`."""
        return False

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
