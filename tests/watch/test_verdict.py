"""What follows from the ranks' signs: pure decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.watch.verdict import Sign, judge

CALL = "allreduce of 1 tensor(s) float32[3]"


def judged(*signs: Sign, timeout: float | None = 100.0, is_strict: bool = False):
    return judge(signs, timeout, is_strict=is_strict)


def waits(rank: int, since: float, call: str = CALL, calls: int = 5, **more) -> Sign:
    return Sign(rank=rank, waiting=call, since=since, calls=calls, **more)


@pytest.mark.parametrize(
    "signs",
    [
        (Sign(rank=0), Sign(rank=1)),
        (waits(0, 50.0), waits(1, 50.0)),  # a long message
        (waits(0, 49.0), Sign(rank=1, calls=4, since=49.0)),  # not half of the time yet
        (waits(0, 1.0), Sign(rank=1, calls=4, ended=True)),  # may be about to see it
        (waits(0, 9.0), Sign(rank=1, calls=5, ended=True)),  # was there; its data is still on the way
        (Sign(rank=0, ended=True), Sign(rank=1, since=1e6)),  # waiting at the exit is no stall
        (waits(0, 70.0, "barrier", calls=6, ended=True), waits(1, 70.0), Sign(rank=2, since=1.0, calls=4)),
        (Sign(rank=0), Sign(rank=1, gone=True, silent=1.0)),  # the launcher may see to it
        (Sign(rank=0), Sign(rank=1, gone=True, silent=9.0, ended=True)),
        (waits(0, 9.0, calls=5), waits(1, 9.0, "broadcast", calls=4)),  # one ahead of the other, for a moment
    ],
)
def test_all_is_well(signs):
    assert judged(*signs) is None


def test_a_rank_that_died_is_named():
    found = judged(Sign(rank=0), waits(1, 4.0), Sign(rank=2, gone=True, silent=4.0))
    assert found.is_fatal
    assert found.ranks == (2,)
    assert "rank 2 has died" in found.text


def test_a_rank_that_ended_early_is_named_with_what_the_others_wait_in():
    found = judged(waits(0, 4.0), Sign(rank=1, calls=4, ended=True))
    assert found.is_fatal
    assert found.ranks == (1,)
    assert "rank 0 waits in allreduce of 1 tensor(s) float32[3] for rank 1, which has ended" in found.text


def test_ranks_in_different_calls_are_both_named():
    found = judged(waits(0, 4.0), waits(1, 4.0, "barrier of 0 tensor(s)"))
    assert found.is_fatal
    assert "rank 0 in its call 5, allreduce" in found.text
    assert "rank 1 in its call 5, barrier" in found.text
    assert judged(waits(0, 90.0), waits(1, 90.0, calls=6)).is_fatal


def test_ranks_in_different_calls_of_graphs_are_named_when_they_stay_there():
    calls = [f"a collective of a graph: sum of 1 tensor(s) float32[{size}]" for size in (2, 3)]
    for since, timeout, is_named in ((9.0, 100.0, False), (9.0, 8.0, True), (61.0, 100.0, True), (61.0, None, True)):
        found = judged(*(waits(rank, since, call) for rank, call in enumerate(calls)), timeout=timeout)
        assert (found is not None) == is_named, (since, timeout)
    assert found.is_fatal
    assert all(call in found.text for call in calls)
    assert judged(waits(0, 61.0, calls[0]), waits(1, 61.0, calls[0])) is None
    assert judged(waits(0, 61.0, calls[0]), waits(1, 61.0, "a collective of a graph")) is None  # what, is not known
    assert judged(waits(0, 61.0, "barrier"), waits(1, 61.0, "a collective of a graph")).is_fatal


@pytest.mark.parametrize(
    ("missing", "is_fatal"),
    [
        (Sign(rank=1, silent=101.0), True),  # stopped
        (Sign(rank=1, since=101.0, stack=("fit", "read")), True),  # blocked in the input
        (Sign(rank=1, since=101.0, busy=True), False),  # fills a buffer
        (Sign(rank=1, since=101.0, own_code=True), False),  # a long save in a callback
        (waits(1, 1.0, silent=101.0), True),  # stopped within the call
        (Sign(rank=1, since=60.0), False),
    ],
)
def test_a_rank_that_keeps_the_others_waiting_is_named(missing, is_fatal):
    found = judged(waits(0, 101.0), missing, waits(2, 101.0))
    assert found.is_fatal == is_fatal
    assert found.ranks == (1,)
    assert "each of ranks 0, 2 waits" in found.text
    assert "rank 1" in found.text.partition("Received")[2]
    assert "stall_timeout=100" in found.text


def test_a_rank_that_gives_no_sign_while_the_others_wait_at_their_exit_is_named():
    ended = Sign(rank=0, ended=True)
    found = judged(ended, Sign(rank=1, since=5.0, silent=101.0), Sign(rank=2, ended=True))
    assert found.is_fatal
    assert found.ranks == (1,)
    assert "each of ranks 0, 2 has ended" in found.text
    assert "rank 1 gives no sign for 101 s" in found.text
    assert judged(ended, Sign(rank=1, since=1e6, silent=99.0)) is None
    assert judged(ended, Sign(rank=1, silent=1e6), timeout=None) is None
    assert judged(Sign(rank=0), Sign(rank=1, silent=1e6)) is None  # nobody waits


def test_patience_that_the_user_set_holds_for_all():
    busy = Sign(rank=1, since=101.0, busy=True, own_code=True)
    assert judged(waits(0, 101.0), busy, is_strict=True).is_fatal
    assert judged(waits(0, 1e6), busy, timeout=None) is None


seconds = st.floats(0, 1e6)
signs = st.builds(
    Sign,
    rank=st.just(0),
    silent=seconds,
    gone=st.booleans(),
    ended=st.booleans(),
    calls=st.integers(0, 3),
    waiting=st.sampled_from([None, "a", "b"]),
    since=seconds,
    busy=st.booleans(),
    own_code=st.booleans(),
    stack=st.just(("x",)),
)


@given(st.lists(signs, min_size=2, max_size=4), st.one_of(st.none(), seconds), st.booleans())
def test_a_verdict_blames_somebody_and_says_what_to_do(several, timeout, is_strict):
    found = judged(*several, timeout=timeout, is_strict=is_strict)
    if found is not None:
        assert found.ranks
        assert all(word in found.text for word in ("Received: ", "Expected ", "Fix: "))
    if found is not None and timeout is None:
        assert found.is_fatal
