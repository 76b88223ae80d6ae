"""Every two values of any two factors meet, in far fewer combinations than all."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.pairwise import pairwise


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_every_pair_meets(sizes: list[int]) -> None:
    factors = [[f"{number}{value}" for value in range(size)] for number, size in enumerate(sizes)]
    chosen = pairwise(*factors)
    assert len(chosen) == len(set(chosen))
    assert all(value in factor for each in chosen for value, factor in zip(each, factors, strict=True))
    for one, other in itertools.combinations(factors, 2):
        for pair in itertools.product(one, other):
            assert any(set(pair) <= set(each) for each in chosen), pair


def test_it_is_small_and_the_same_at_every_call() -> None:
    factors = [range(8), "abc", "vwxyz", [2, 3, 4]]
    assert pairwise(*factors) == pairwise(*factors)
    assert (
        40 <= len(pairwise(*factors)) <= 50
    )  # 8 * 5 = 40 pairs of the two longest must each have a place; all are 360


def test_one_factor_is_taken_whole() -> None:
    assert pairwise("ab") == [("a",), ("b",)]
