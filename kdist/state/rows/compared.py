"""What a tensor holds for made-up rows, compared with what it holds for parts of them and for others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Compared:
    """What a tensor has been found to hold for made-up rows.

    Attributes:
        is_equal: bool, whether it holds what it holds for parts of the rows, in any order.
        has_one_each: bool, whether it holds a row for each row of the data.
        varies: bool, whether it holds something else for other rows.
        is_constant: bool, whether it holds the same for another number of rows.
    """

    is_equal: bool = False
    has_one_each: bool = False
    varies: bool = False
    is_constant: bool = False

    @classmethod
    def of(cls, each: Sequence[Compared]) -> Compared:
        """Returns what holds for all kinds of made-up rows; a tensor varies if it does for some of them."""
        return cls(
            is_equal=all(one.is_equal for one in each),
            has_one_each=all(one.has_one_each for one in each),
            varies=any(one.varies for one in each),
            is_constant=all(one.is_constant for one in each),
        )


def compare(*arrays: np.ndarray, number: int, tolerance: float) -> Compared:
    """Returns what is found of an array.

    Args:
        *arrays: what is computed from all rows, from the first of them, from the others, from the others and then the
            first, and from other rows.
        number: int, how many rows there are.
        tolerance: float, by how much numbers may differ.
    """
    together, first, others, turned, of_others = (np.asarray(each, np.float64) for each in arrays)
    return Compared(
        is_equal=all(
            whole.shape[1:] == one.shape[1:] == other.shape[1:]
            and _are_equal(np.ravel(whole), np.concatenate([np.ravel(one), np.ravel(other)]), tolerance)
            for whole, one, other in ((together, first, others), (turned, others, first))
        ),
        has_one_each=len(first) == 1 and len(together) == number,
        varies=not _are_equal(together, of_others, tolerance),
        is_constant=_are_equal(together, first, tolerance),
    )


def holds_rows_of_parts(results: Sequence[Sequence[np.ndarray]], tolerance: float) -> bool:
    """Returns whether arrays hold, together and in any order, the rows that they hold for each of two parts.

    Args:
        results: sequence of what is computed for each array, as the arguments of `compare`.
        tolerance: float, by how much numbers may differ.
    """
    generator = np.random.default_rng(0)
    numbers = {tuple(len(each) for each in arrays[:3]) for arrays in results if arrays[0].ndim}
    sums: list[Any] = [0.0] * 3  # of each row, by which rows are compared in any order
    for arrays in results:
        together, first, others, *_ = (np.asarray(each, np.float64) for each in arrays)
        if not together.ndim or not together.shape[1:] == first.shape[1:] == others.shape[1:]:
            return False
        factors = generator.uniform(0.5, 1.5, together.shape[1:])
        own = [np.sum(each * factors, axis=tuple(range(1, each.ndim))) for each in (together, first, others)]
        sums = [before + each for before, each in zip(sums, own, strict=True)] if len(numbers) == 1 else own
        if len(numbers) > 1 and not _are_equal(np.sort(sums[0]), np.sort(np.concatenate(sums[1:])), tolerance):
            return False
    return _are_equal(np.sort(sums[0]), np.sort(np.concatenate(sums[1:])), tolerance)


def _are_equal(one: np.ndarray, other: np.ndarray, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    are_finite = np.isfinite(one) & np.isfinite(other)
    are_same = np.array_equal(one[~are_finite], other[~are_finite], equal_nan=True)
    one, other = one[are_finite], other[are_finite]
    sizes = np.abs(one)
    usual = np.median(sizes[sizes > 0]) if np.any(sizes) else 0.0
    return bool(are_same and np.all(np.abs(one - other) <= tolerance * (sizes + usual)))
