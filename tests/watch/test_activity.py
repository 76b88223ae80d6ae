"""What a rank reports in its heartbeat."""

import json
import re

from kdist.watch.activity import Activity
from kdist.watch.heartbeat import MAX_MESSAGE_BYTES


def test_a_report_describes_the_collective_and_its_tensors():
    activity = Activity()
    activity.begin("allreduce", [("float32", (3, 2)), ("int64", (5,))], 1)
    report = activity.report()
    assert (report["calls"], report["waiting"]) == (1, "allreduce of 2 tensor(s) float32[3, 2] int64[any]")
    activity.end()
    assert activity.report()["waiting"] is None
    activity.begin("barrier", [], 0)
    assert activity.report()["waiting"] == "barrier"


def test_the_progress_of_graphs_is_reported():
    found = iter([(0, 0, ""), (3, 2, ""), (3, 2, ""), (3, 3, ""), (4, 3, "sum of 1 tensor(s) float32[2]")])
    activity = Activity()
    activity.graph_progress = lambda: next(found)
    assert activity.report()["waiting"] is None
    first, later = activity.report(), activity.report()
    assert (first["calls"], first["waiting"]) == (later["calls"], later["waiting"]) == (3, "a collective of a graph")
    assert later["elapsed"] >= first["elapsed"]
    assert activity.report()["waiting"] is None
    assert activity.report()["waiting"] == "a collective of a graph: sum of 1 tensor(s) float32[2]"
    activity.has_finished = True
    assert activity.report()["calls"] == 4  # graphs are not asked any more


def test_the_verb_that_runs_is_reported_with_the_line_that_calls_it():
    activity = Activity()
    assert activity.report()["place"] == ""
    with activity.running("model.fit"):
        own = activity.report()["place"]
        assert re.fullmatch(r"`model.fit`, test_activity.py:\d+", own)
        activity._verbs[0] = "model.fit", "train.py:9"
        with activity.running("model.evaluate"):  # in a callback
            assert "`model.evaluate`, test_activity.py:" in activity.report()["place"]
        assert activity.report()["place"] == "`model.fit`, train.py:9"
    activity._since -= 2.0  # waits in no verb: the line is looked up
    assert activity.report()["place"].startswith("test_activity.py:")
    activity.has_finished = True
    assert activity.report()["place"] == ""


def test_a_barrier_at_exit_is_not_counted():
    activity = Activity()
    activity.begin("barrier", [], 0)
    activity.end()
    activity.has_finished = True
    activity.begin("barrier", [], 0)
    report = activity.report()
    assert (report["calls"], report["waiting"]) == (1, "barrier")


def test_the_report_of_a_deep_recursion_fits_a_message():
    activity = Activity()
    activity._since -= 60.0

    def deeper(depth):
        return deeper(depth - 1) if depth else activity.report()

    report = deeper(900)
    assert len(report["stack"]) == 12
    assert 0 < len(json.dumps(report)) < MAX_MESSAGE_BYTES


def test_calls_of_groups_are_reported_with_their_ranks_and_not_counted():
    activity = Activity()
    activity.begin("recv from 3", [("float32", (2,))], 1, among=(1, 3))
    report = activity.report()
    assert (report["calls"], report["among"]) == (0, [1, 3])
    assert report["waiting"] == "recv from 3 of 1 tensor(s) float32[2] among ranks 1, 3"
    activity.end()
    activity.graph_progress = lambda: (7, 7, "")
    activity.group_progress = [(lambda: (2, 2, ""), (0, 1)), (lambda: (2, 1, "allreduce"), (1, 2))]
    report = activity.report()
    assert (report["calls"], report["waiting"], report["among"]) == (7, "allreduce among ranks 1, 2", [1, 2])
