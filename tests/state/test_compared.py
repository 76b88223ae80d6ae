"""What a tensor holds for made-up rows, compared with what it holds for parts of them."""

import numpy as np
import pytest

from kdist.state.rows.compared import Compared, compare, holds_rows_of_parts

ROWS, OTHERS = np.random.default_rng(0).normal(size=(2, 6, 3))


def compared(function, tolerance=1e-4):
    parts = ROWS, ROWS[:1], ROWS[1:], np.concatenate([ROWS[1:], ROWS[:1]]), OTHERS
    return compare(*map(function, parts), number=len(ROWS), tolerance=tolerance)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (np.tanh, Compared(is_equal=True, has_one_each=True, varies=True)),
        (lambda x: np.log(x), Compared(is_equal=True, has_one_each=True, varies=True)),
        (np.zeros_like, Compared(is_equal=True, has_one_each=True)),
        (lambda x: x.reshape(-1), Compared(is_equal=True, varies=True)),
        (lambda x: x[x[:, 0] > 0], Compared(is_equal=True, varies=True)),
        (lambda x: np.sort(x, axis=0), Compared(has_one_each=True, varies=True)),
        (lambda x: x - x.mean(axis=0), Compared(has_one_each=True, varies=True)),
        (lambda x: x @ x.T, Compared(has_one_each=True, varies=True)),
        (lambda x: x[::2], Compared(varies=True)),
        (lambda x: np.arange(len(x)), Compared(has_one_each=True)),
        (lambda x: np.arange(4), Compared(is_constant=True)),
        # A large number hides no small one.
        (
            lambda x: np.concatenate([np.full((len(x), 1), 1e9), np.cumsum(x, 0)], 1),
            Compared(has_one_each=True, varies=True),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in log")
def test_what_holds_for_parts_of_the_rows(function, expected):
    assert compared(function) == expected


def test_what_holds_for_all_kinds_of_rows():
    one, other = Compared(is_equal=True, has_one_each=True), Compared(is_equal=True, varies=True)
    assert Compared.of([one, other]) == Compared(is_equal=True, varies=True)


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        ([np.tanh], True),
        ([lambda x: np.concatenate([x, 2 * x]), lambda x: np.concatenate([np.zeros(len(x)), np.ones(len(x))])], True),
        ([lambda x: np.sort(x[:, 0]), lambda x: x[:, 0]], False),  # in other pairs
        ([lambda x: np.sort(x[:, 0]), lambda x: np.concatenate([x[:, 0], x[:, 1]])], True),  # not used row by row
        ([lambda x: np.arange(len(x)), np.tanh], False),
        ([lambda x: x @ x.T], False),
        ([lambda x: x - x.max(axis=0)], False),
        ([np.sum], False),
        ([lambda x: x[x[:, 0] > 0]], True),
    ],
)
def test_rows_in_any_order(functions, expected):
    parts = ROWS, ROWS[:1], ROWS[1:]
    assert holds_rows_of_parts([[function(part) for part in parts] for function in functions], 1e-4) == expected
