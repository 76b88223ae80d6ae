"""Which hosts are left out, after attempts that are written down here."""

import pytest

from kdist.restarts.attempt import Attempt, End
from kdist.restarts.bad_hosts import left_out, to_blame
from kdist.restarts.events import Events, Failure, Kind
from kdist.restarts.progress import Progress
from kdist.restarts.rules import decide

ENDED = 1000.0


def attempt(hosts, kind=None, rank=None, host="", *, saved=0, step=True, at=ENDED, seen=None):
    events = Events(seen or dict(enumerate(hosts)), step, (), None)
    failure = None if kind is None else Failure(kind, "it failed", rank, host)
    progress = Progress(1, saved, saved, saved, min(saved, 1), 0, saved, 0, at - 5, at - 1) if saved else None
    return Attempt(End.FAILED, 1, at - 10, at, events, failure, progress, None, tuple(hosts))


LOST = attempt("abc", Kind.LOST, host="b")
KILLED = attempt("abc", Kind.SIGNAL, 1)


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([LOST], {"b"}),
        ([attempt("abc", Kind.LOST, host="node7", seen={0: "node6", 1: "node7"})], {"b"}),  # its name for itself
        ([attempt("abc", Kind.LOST, host="elsewhere")], set()),
        ([attempt("abc", Kind.LOST, 1, "b")], set()),  # a rank that died, as any may
        ([KILLED], set()),
        ([KILLED, KILLED], {"b"}),
        ([KILLED, attempt("abc", Kind.STALL, 1)], {"b"}),
        ([KILLED, attempt("abc", Kind.SIGNAL, 2)], set()),
        ([attempt("aabc", Kind.SIGNAL, 1), attempt("aabc", Kind.SIGNAL, 0)], {"a"}),
        ([attempt("aa", Kind.SIGNAL, 1), attempt("aa", Kind.SIGNAL, 1)], set()),  # there is no other host
        ([attempt("ac"), attempt("abc", Kind.RESIZE)], set()),
        ([attempt("ac"), attempt("abc", step=False)], {"b"}),  # it started without that one
        ([attempt("ac"), attempt("abc", Kind.SIGNAL, 0, step=False)], {"b"}),
        ([attempt("abc"), attempt("ac"), attempt("abc", step=False)], {"b"}),  # although it once did take part
        ([attempt("abc", step=False)], set()),
        ([attempt("abc"), attempt("ac", step=False)], set()),
    ],
)
def test_who_is_to_blame(attempts, expected):
    assert to_blame(attempts) == expected


def test_a_host_is_left_out_twice_as_long_each_time():
    assert left_out([LOST], ENDED + 59, 60) == {"b": ENDED + 60}
    assert left_out([LOST], ENDED + 61, 60) == {}
    assert left_out([LOST] * 2, ENDED, 60) == {"b": ENDED + 120}
    assert left_out([LOST] * 20, ENDED, 60) == {"b": ENDED + 1800}


def test_a_host_that_takes_part_in_a_checkpoint_begins_anew():
    good = attempt("abc", Kind.LOST, host="c", saved=3)
    assert left_out([LOST, LOST, good], ENDED, 60) == {"c": ENDED + 60}
    assert left_out([LOST, LOST, good, LOST], ENDED, 60)["b"] == ENDED + 60
    without = attempt("ac", Kind.SIGNAL, 0, saved=3)
    assert left_out([LOST, LOST, without, LOST], ENDED, 60)["b"] == ENDED + 240


def test_a_larger_job_that_does_not_start_is_no_failed_start():
    before = attempt("ac", Kind.RESIZE, saved=2)
    decision = decide([before, attempt("abc", step=False)], 2)
    assert decision.again
    assert decision.left == 1  # it counts
    assert not decide([before, attempt("ac", step=False)], 2).again
