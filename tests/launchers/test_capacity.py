"""Which hosts an attempt takes."""

import pytest

from kdist.launchers.capacity import Placement, place
from kdist.launchers.hosts import Host

HOSTS = (Host("a", 2), Host("b", 2), Host("c", 1))


@pytest.mark.parametrize(
    ("answering", "left_out", "least", "most", "expected"),
    [
        ("abc", "", 2, 5, "a:2,b:2,c:1"),
        ("abc", "", 2, 3, "a:2,b:1"),  # in their order, the last one in part
        ("abc", "", 2, 4, "a:2,b:2"),  # no host without a rank
        ("ac", "", 2, 5, "a:2,c:1"),
        ("abc", "b", 2, 5, "a:2,c:1"),
        ("abc", "b", 3, 4, "a:2,c:1"),
        ("abc", "b", 4, 4, "a:2,b:2"),  # a host that is left out, before the job ends for it
        ("abc", "abc", 5, 5, "a:2,b:2,c:1"),
        ("bc", "b", 1, 5, "c:1"),
        ("c", "", 2, 5, None),
        ("", "", 1, 5, None),
        ("abcd", "", 1, 9, "a:2,b:2,c:1"),
    ],
)
def test_where_an_attempt_runs(answering, left_out, least, most, expected):
    found = place(HOSTS, answering, left_out, least, most)
    assert found is None if expected is None else str(found) == expected


def test_the_host_of_each_rank():
    placement = Placement((Host("a", 2), Host("c", 1)))
    assert placement.np == 3
    assert placement.host_of_rank == ("a", "a", "c")
