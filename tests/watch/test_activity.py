"""What a rank tells of itself."""

import json

from kdist.watch.activity import Activity
from kdist.watch.link import _LONGEST


def test_a_call_is_told_with_what_is_sent():
    activity = Activity()
    activity.begin("allreduce", [("float32", (3, 2)), ("int64", (5,))], 1)
    told = activity.report()
    assert (told["calls"], told["waiting"]) == (1, "allreduce of 2 tensor(s) float32[3, 2] int64[any]")
    activity.end()
    assert activity.report()["waiting"] is None
    activity.begin("barrier", [], 0)
    assert activity.report()["waiting"] == "barrier"


def test_graphs_are_asked_how_far_they_are():
    found = iter([(0, 0, ""), (3, 2, ""), (3, 2, ""), (3, 3, ""), (4, 3, "sum of 1 tensor(s) float32[2]")])
    activity = Activity()
    activity.of_graphs = lambda: next(found)
    assert activity.report()["waiting"] is None
    first, later = activity.report(), activity.report()
    assert (first["calls"], first["waiting"]) == (later["calls"], later["waiting"]) == (3, "a collective of a graph")
    assert later["since"] >= first["since"]
    assert activity.report()["waiting"] is None
    assert activity.report()["waiting"] == "a collective of a graph: sum of 1 tensor(s) float32[2]"
    activity.has_ended = True
    assert activity.report()["calls"] == 4  # graphs are not asked any more


def test_what_waits_at_the_exit_is_no_call():
    activity = Activity()
    activity.begin("barrier", [], 0)
    activity.end()
    activity.has_ended = True
    activity.begin("barrier", [], 0)
    told = activity.report()
    assert (told["calls"], told["waiting"]) == (1, "barrier")


def test_a_deep_recursion_is_told_in_a_message():
    activity = Activity()
    activity._since -= 60.0

    def deeper(depth):
        return deeper(depth - 1) if depth else activity.report()

    told = deeper(900)
    assert len(told["stack"]) == 12
    assert 0 < len(json.dumps(told)) < _LONGEST
