"""A small part of a product of factors in which every two values of any two factors meet."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence


def pairwise(*factors: Sequence[Hashable]) -> list[tuple[Hashable, ...]]:
    """Chooses combinations, one value of each factor, until every pair of values has met. The same at every call.

    Greedy: the next combination is the one with the most pairs that have not met, the first among equals.

    Args:
        *factors: sequences of values; each has at least one.

    Returns:
        A list of tuples, in the order in which they were chosen.

    Example:
    >>> pairwise("ab", [1, 2])
    [('a', 1), ('a', 2), ('b', 1), ('b', 2)]
    """
    if len(factors) < 2:
        return list(itertools.product(*factors))
    candidates = {each: _pairs(each) for each in itertools.product(*factors)}
    missing = set().union(*candidates.values())
    chosen = []
    while missing:
        best = max(candidates, key=lambda each: len(candidates[each] & missing))
        missing -= candidates.pop(best)
        chosen.append(best)
    return chosen


def _pairs(values: tuple[Hashable, ...]) -> set[tuple[tuple[int, Hashable], tuple[int, Hashable]]]:
    return set(itertools.combinations(enumerate(values), 2))
