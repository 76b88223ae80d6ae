"""Which rank is slow, and why; what is printed."""

import pytest

from kdist.callbacks.throughput import Times, diagnose, table


def times(seconds=10.0, input=0.5, waiting=0.5):
    return Times(640, seconds, input, waiting)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([times(waiting=4.0), times(input=4.0)], (1, "input-bound")),
        ([times(), times(waiting=4.0), times(waiting=4.2)], (0, "slow compute")),
        # Both late and hungry: the larger part is named.
        ([times(waiting=5.0), times(input=2.0)], (1, "slow compute")),
        ([times(waiting=5.0), times(input=4.0)], (1, "input-bound")),
        ([times(waiting=4.0), times(waiting=4.1)], (0, "slow link")),
        ([times(waiting=1.0), times(waiting=1.9)], None),
        ([times(waiting=1.0), times(waiting=2.1)], (0, "slow compute")),
        ([times(waiting=9.0)], None),
        ([times(0.0, 0.0, 0.0)] * 2, None),
    ],
)
def test_the_slowest_rank_is_named(ranks, said):
    assert diagnose(ranks) == said


def test_the_shares_sum_to_one():
    assert times(10.0, 2.0, 3.0).shares() == {"input": 0.2, "compute": 0.5, "waiting": 0.3}
    assert set(times(0.0, 0.0, 0.0).shares().values()) == {0.0}


def test_the_table():
    ranks = [times(input=0.2, waiting=4.0), times(input=4.5, waiting=0.1)]
    assert table(ranks, 3, (1, "input-bound")).splitlines() == [
        "Throughput: 128 samples/s over 2 rank(s), 3 epoch(s)",
        "rank   input  compute  waiting",
        "   0    2.0%    58.0%    40.0%",
        "   1   45.0%    54.0%     1.0%  slowest: input-bound",
    ]
