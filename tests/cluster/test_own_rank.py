"""A process that a rank has started is not that rank."""

import os

import pytest

from kdist.cluster.info import ClusterInfo
from kdist.cluster.own_rank import take_rank
from kdist.errors import ClusterError

RANK = ClusterInfo(launcher="openmpi", rank=0, size=2)


def test_the_first_scope_of_a_rank_and_later_ones():
    env = {}
    take_rank(RANK, env)
    take_rank(RANK, env)


@pytest.mark.parametrize(
    ("info", "is_refused"),
    [
        (RANK, True),
        (ClusterInfo(launcher="openmpi", rank=0, size=3), False),  # of another job, that the rank has started
        (ClusterInfo(launcher="tf_config", rank=0, size=2), False),
    ],
)
def test_what_a_rank_starts_is_not_that_rank(monkeypatch, info, is_refused):
    env = {}
    take_rank(RANK, env)
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    if not is_refused:
        take_rank(info, env)
        return
    with pytest.raises(ClusterError, match=f"which process {own} is.*Fix: start it with KDIST_STRATEGY=single"):
        take_rank(info, env)
