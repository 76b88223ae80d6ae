"""The failure detector: pure decisions from the reports of all ranks."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.restarts.events import Kind
from kdist.watch.failure_detector import RankReport, StallTimeout, detect_failure

CALL = "allreduce of 1 tensor(s) float32[3]"


def detect(*reports: RankReport, timeout: float | None = 100.0, is_strict: bool = False):
    return detect_failure(reports, StallTimeout(timeout, is_strict))


def waits(rank: int, elapsed: float, call: str = CALL, calls: int = 5, **more) -> RankReport:
    return RankReport(rank=rank, waiting=call, elapsed=elapsed, calls=calls, **more)


@pytest.mark.parametrize(
    "reports",
    [
        (RankReport(rank=0), RankReport(rank=1)),
        (waits(0, 50.0), waits(1, 50.0)),  # a long message
        (waits(0, 49.0), RankReport(rank=1, calls=4, elapsed=49.0)),  # not half of the time yet
        (waits(0, 1.0), RankReport(rank=1, calls=4, finished=True)),  # may be about to see it
        (waits(0, 9.0), RankReport(rank=1, calls=5, finished=True)),  # was there; its data is still on the way
        (RankReport(rank=0, finished=True), RankReport(rank=1, elapsed=1e6)),  # waiting at the exit is no stall
        (waits(0, 70.0, "barrier", calls=6, finished=True), waits(1, 70.0), RankReport(rank=2, elapsed=1.0, calls=4)),
        (RankReport(rank=0), RankReport(rank=1, disconnected=True, heartbeat_age=1.0)),  # the launcher may end the job
        (RankReport(rank=0), RankReport(rank=1, disconnected=True, heartbeat_age=9.0, finished=True)),
        (waits(0, 9.0, calls=5), waits(1, 9.0, "broadcast", calls=4)),  # one ahead of the other, for a moment
        # Groups make different calls; who receives from a rank that receives from one that computes waits with reason.
        (waits(0, 99.0, "a", among=(0, 1)), waits(1, 99.0, "a", among=(0, 1)), waits(2, 99.0, "b", among=(2,))),
        (waits(0, 49.0, "recv from 1", among=(0, 1)), waits(1, 49.0, "recv from 2", among=(1, 2)), RankReport(rank=2)),
        (waits(0, 9.0, "a", among=(0, 1)), RankReport(rank=1, finished=True)),  # its data is still on the way
    ],
)
def test_no_failure(reports):
    assert detect(*reports) is None


def test_a_rank_that_died_is_named():
    found = detect(RankReport(rank=0), waits(1, 4.0), RankReport(rank=2, disconnected=True, heartbeat_age=4.0))
    assert found.is_fatal
    assert found.ranks == (2,)
    assert "rank 2 died" in found.text


def test_a_rank_that_finished_early_is_named_with_the_collective_of_the_others():
    found = detect(waits(0, 4.0), RankReport(rank=1, calls=4, finished=True))
    assert found.is_fatal
    assert found.ranks == (1,)
    assert found.text.startswith("rank 1 has ended its script; rank 0 is in allreduce of 1 tensor(s) float32[3]. ")


def test_the_users_call_and_line_stand_in_the_place_of_collectives():
    """Where two ranks are in the same method, the collectives are told, too."""
    fit, evaluate = "`model.fit`, train.py:9", "`model.evaluate`, train.py:15"
    found = detect(waits(0, 4.0, place=evaluate), RankReport(rank=1, calls=4, finished=True))
    assert found.text.startswith(f"rank 1 has ended its script; rank 0 is in {evaluate}. ")
    found = detect(waits(0, 4.0, place=evaluate), waits(1, 4.0, "barrier", place=fit))
    assert f"rank 0 is in {evaluate}; rank 1 is in {fit}. Expected" in found.text
    found = detect(waits(0, 4.0, place=fit), waits(1, 4.0, "barrier", place=fit))
    assert f"rank 1 is in {fit}, in its call 5, barrier. Expected" in found.text
    found = detect(waits(0, 101.0, place=fit), RankReport(rank=1, heartbeat_age=101.0))
    assert f"rank 0 waits in {fit} for 101 s" in found.text
    blocked = RankReport(rank=1, elapsed=101.0, idle=9.0, place=fit, stack=("threading.py:3",))
    found = detect(waits(0, 101.0, place=fit), blocked)
    assert found.text.startswith(f"rank 1 makes no collective for 101 s and is idle in {fit}; rank 0 waits in {fit}")
    found = detect(waits(0, 4.0), RankReport(rank=1, disconnected=True, heartbeat_age=4.0, place=fit))
    assert f"rank 1 died without an error message, in {fit}. " in found.text
    found = detect(waits(0, 4.0), RankReport(rank=1, disconnected=True, heartbeat_age=4.0, place=fit, has_failed=True))
    assert found.text.startswith(f"rank 1 failed, in {fit}. Received: an error or an exit, which its own output names.")
    consequence = RankReport(rank=1, disconnected=True, heartbeat_age=4.0, has_failed=True)
    found = detect(waits(0, 4.0), consequence, RankReport(rank=2, disconnected=True, heartbeat_age=4.0))
    assert found.text.startswith("rank 2 died without an error message; rank 1 failed, as its own output says. ")
    assert found.ranks == (2, 1)


def test_ranks_in_different_calls_are_both_named():
    found = detect(waits(0, 4.0), waits(1, 4.0, "barrier of 0 tensor(s)"))
    assert found.is_fatal
    assert "rank 0 is in its call 5, allreduce" in found.text
    assert "rank 1 is in its call 5, barrier" in found.text
    assert detect(waits(0, 90.0), waits(1, 90.0, calls=6)).is_fatal


def test_ranks_without_heartbeat_are_not_said_to_be_in_other_calls():
    """The others may have gone on since."""
    found = detect(waits(0, 101.0, calls=6), waits(1, 70.0, calls=5, heartbeat_age=101.0))
    assert (found.is_fatal, found.ranks) == (True, (1,))
    assert found.text.startswith("rank 1 sends no heartbeat for 101 s")
    assert detect(waits(0, 49.0, "barrier"), waits(1, 4.0, heartbeat_age=49.0)) is None
    first = waits(0, 61.0, "recv from 1", among=(0, 1))
    other = waits(1, 61.0, "recv from 0", among=(0, 1), heartbeat_age=4.0)
    assert detect(first, other) is None


def test_ranks_that_wait_for_each_other_in_calls_of_groups_are_named():
    first, other = waits(0, 61.0, "recv from 1", among=(0, 1)), waits(1, 61.0, "recv from 0", among=(0, 1))
    found = detect(first, other)
    assert found.is_fatal
    assert found.ranks == (0, 1)
    assert "rank 0 is in its call 5, recv from 1; rank 1 is in its call 5, recv from 0" in found.text
    assert detect(first, other, RankReport(rank=2, elapsed=1.0)) is None  # which may come to their help
    assert detect(first, waits(1, 61.0, CALL)).ranks == (0, 1)


def test_a_rank_that_ended_before_a_call_of_its_group_is_named():
    finished = [RankReport(rank=rank, finished=True) for rank in (1, 2)]
    found = detect(waits(0, 61.0, "a", among=(0, 1)), *finished)
    assert (found.is_fatal, found.ranks) == (True, (1,))


def test_ranks_in_different_calls_of_graphs_are_named_when_they_stay_there():
    calls = [f"a collective of a graph: sum of 1 tensor(s) float32[{size}]" for size in (2, 3)]
    for elapsed, timeout, is_named in ((9.0, 100.0, False), (9.0, 8.0, True), (61.0, 100.0, True), (61.0, None, True)):
        found = detect(*(waits(rank, elapsed, call) for rank, call in enumerate(calls)), timeout=timeout)
        assert (found is not None) == is_named, (elapsed, timeout)
    assert found.is_fatal
    assert all(call in found.text for call in calls)
    assert detect(waits(0, 61.0, calls[0]), waits(1, 61.0, calls[0])) is None
    assert detect(waits(0, 61.0, calls[0]), waits(1, 61.0, "a collective of a graph")) is None  # which one is unknown
    assert detect(waits(0, 61.0, "barrier"), waits(1, 61.0, "a collective of a graph")).is_fatal


@pytest.mark.parametrize(
    ("missing", "is_fatal"),
    [
        (RankReport(rank=1, heartbeat_age=101.0), True),  # stopped
        (RankReport(rank=1, elapsed=101.0, idle=61.0, stack=("fit", "read")), True),  # blocked in the input
        (RankReport(rank=1, elapsed=101.0), False),  # fills a buffer
        (RankReport(rank=1, elapsed=101.0, idle=59.0), False),  # waits for the disk between two batches
        (RankReport(rank=1, elapsed=101.0, idle=61.0, in_user_code=True), False),  # a long save in a callback
        (waits(1, 1.0, heartbeat_age=101.0), True),  # stopped within the call
        (RankReport(rank=1, elapsed=60.0), False),
    ],
)
def test_a_rank_that_keeps_the_others_waiting_is_named(missing, is_fatal):
    found = detect(waits(0, 101.0), missing, waits(2, 101.0))
    assert found.is_fatal == is_fatal
    assert found.ranks == (1,)
    assert "each of ranks 0, 2 waits" in found.text
    assert found.text.startswith("rank 1 ")
    assert "stall_timeout=100" in found.text


def test_a_call_of_all_ranks_that_does_not_end_is_told_of():
    place, groups = "`model.fit`, train.py:9", {"among": (0, 1)}
    several = [waits(rank, 101.0 + rank, place=place) for rank in range(4)]
    found = detect(*several, timeout=100.0)
    assert (found.is_fatal, found.ranks, found.kind) == (False, (0, 1, 2, 3), Kind.STALL)
    assert found.text.startswith(f"All ranks are in one call for 101 s. Received: rank 0 is in {place}, in its call 5")
    assert "kdist.scope(stall_timeout=SECONDS) ends such a job, None allows any time." in found.text
    found = detect(*several, timeout=100.0, is_strict=True)
    assert found.is_fatal
    assert "kdist.scope(stall_timeout=...) allows more time, None any time." in found.text
    assert detect(*several, RankReport(rank=4, finished=True, calls=5)).ranks == (0, 1, 2, 3)
    assert detect(*several, timeout=None) is None
    assert detect(*several, waits(4, 99.0)) is None  # has arrived just now
    assert detect(waits(0, 101.0, **groups), waits(1, 101.0, **groups)) is None  # groups wait for others with reason
    assert detect(RankReport(rank=0, finished=True, calls=5), waits(1, 101.0)) is None  # all that rank 1 knows of


def test_of_many_ranks_at_fault_the_first_are_described():
    found = detect(waits(0, 101.0), *(RankReport(rank=rank, heartbeat_age=101.0) for rank in range(1, 9)))
    assert found.ranks == (1, 2, 3, 4, 5, 6, 7, 8)
    assert found.text.count("sends no heartbeat") == 3
    assert "; 5 other ranks do not arrive; rank 0 waits in " in found.text
    assert "Received: no call of 8 of 9 ranks." in found.text


def test_a_rank_without_heartbeat_while_the_others_wait_at_their_exit_is_named():
    ended = RankReport(rank=0, finished=True)
    found = detect(ended, RankReport(rank=1, elapsed=5.0, heartbeat_age=101.0), RankReport(rank=2, finished=True))
    assert found.is_fatal
    assert found.ranks == (1,)
    assert found.text.startswith("rank 1 sends no heartbeat for 101 s")
    assert "each of ranks 0, 2 has finished" in found.text
    assert detect(ended, RankReport(rank=1, elapsed=1e6, heartbeat_age=99.0)) is None
    assert detect(ended, RankReport(rank=1, heartbeat_age=1e6), timeout=None) is None
    assert detect(RankReport(rank=0), RankReport(rank=1, heartbeat_age=1e6)) is None  # nobody waits


def test_a_rank_without_heartbeat_after_a_long_callback_is_named_in_time():
    late = RankReport(rank=1, elapsed=3600.0, in_user_code=True, heartbeat_age=101.0)
    found = detect(waits(0, 3700.0), late)
    assert found.is_fatal
    assert found.text.startswith("rank 1 sends no heartbeat for 101 s")
    late = dataclasses.replace(late, heartbeat_age=99.0)
    assert not detect(waits(0, 3700.0), late).is_fatal


def test_a_stall_timeout_of_the_user_holds_for_busy_ranks():
    busy = RankReport(rank=1, elapsed=101.0, in_user_code=True)
    assert detect(waits(0, 101.0), busy, is_strict=True).is_fatal
    assert detect(waits(0, 1e6), busy, timeout=None) is None


seconds = st.floats(0, 1e6)
reports = st.builds(
    RankReport,
    rank=st.just(0),
    heartbeat_age=seconds,
    disconnected=st.booleans(),
    finished=st.booleans(),
    calls=st.integers(0, 3),
    waiting=st.sampled_from([None, "a", "b"]),
    elapsed=seconds,
    idle=seconds,
    in_user_code=st.booleans(),
    stack=st.just(("x",)),
)


@given(st.lists(reports, min_size=2, max_size=4), st.one_of(st.none(), seconds), st.booleans())
def test_a_failure_names_ranks_and_a_fix(several, timeout, is_strict):
    found = detect(*several, timeout=timeout, is_strict=is_strict)
    if found is not None:
        assert found.ranks
        assert all(word in found.text for word in ("Received: ", "Expected ", "Fix: "))
    if found is not None and timeout is None:
        assert found.is_fatal
