"""What a rank reports in its heartbeat."""

import contextlib
import json
import re
import threading
import time

import keras
import numpy as np
import pytest

import kdist
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


def test_the_method_that_runs_is_reported_with_the_line_that_calls_it():
    activity = Activity()
    assert activity.report()["place"] == ""
    with activity.running("model.fit"):
        own = activity.report()["place"]
        assert re.fullmatch(r"`model.fit`, test_activity.py:\d+", own)
        activity._running[0] = "model.fit", "train.py:9"
        with activity.running("model.evaluate"):  # in a callback
            assert "`model.evaluate`, test_activity.py:" in activity.report()["place"]
        assert activity.report()["place"] == "`model.fit`, train.py:9"
    activity._since -= 2.0  # waits in no method: the line is looked up
    assert activity.report()["place"].startswith("test_activity.py:")
    activity.has_finished = True
    assert activity.report()["place"] == ""


def test_the_time_without_the_cpu_is_reported():
    activity = Activity()
    activity._active_at -= 30.0
    assert activity.report()["idle"] < 1.0, "the CPU time of its start"
    activity._active_at -= 30.0
    activity._times = time.monotonic() - 1.0, time.process_time()
    assert 30.0 <= activity.report()["idle"] < 31.0
    activity._times = time.monotonic() - 1.0, time.process_time()
    activity.exclude_stopped_time(29.0)
    assert 1.0 <= activity.report()["idle"] < 30.0
    activity._times = time.monotonic() - 1.0, time.process_time() - 0.5
    assert activity.report()["idle"] < 1.0


def test_a_batch_that_ends_is_progress_and_no_collective():
    activity = Activity()
    activity._times = time.monotonic(), time.process_time() + 9.0
    activity._active_at = activity._since = time.monotonic() - 300.0
    assert activity.report()["idle"] >= 300.0
    activity._times = time.monotonic(), time.process_time() + 9.0
    activity.end_batch()
    report = activity.report()
    assert (report["idle"] < 60.0, report["elapsed"] >= 300.0) == (True, True)


@pytest.mark.parametrize(("method", "steps"), [("fit", 2), ("evaluate", 4), ("predict", 4)])
def test_each_batch_of_a_pass_is_progress(method, steps, monkeypatch):
    ended = []
    monkeypatch.setattr(Activity, "end_batch", lambda self: ended.append(self))
    x = np.ones((8, 1), "float32")
    with kdist.scope(micro_batches=2):
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        data = {"x": x} if method == "predict" else {"x": x, "y": x}
        getattr(model, method)(**data, batch_size=2, verbose=0)
    assert len(ended) == steps


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


KERAS = "/lib/keras/src/"
LOOP = KERAS + "backend/tensorflow/trainer.py"
CALLBACK = KERAS + "callbacks/callback_list.py"


@pytest.mark.parametrize(
    ("outermost", "depth", "innermost", "is_users"),
    [
        ("", 5, "", True),  # a method, before Keras' loop: a `fit` of the user's own
        (LOOP, 5, "", False),
        (LOOP, 5, CALLBACK, True),
        (LOOP, 150, "", False),  # the frame of the loop is not read
        (LOOP, 150, CALLBACK, True),
    ],
)
def test_a_rank_is_in_the_users_code_outside_of_kerass_loop_or_in_a_callback(outermost, depth, innermost, is_users):
    activity = Activity()
    activity._since -= 60.0

    def called_in(file, called):
        scope = {"called": called}
        exec(compile("def calls():\n    return called()", file, "exec"), scope)
        return scope["calls"]() if file else called()

    def deeper(depth):
        return deeper(depth - 1) if depth else called_in(innermost, activity.report)

    with activity.running("model.fit"):
        assert called_in(outermost, lambda: deeper(depth))["in_user_code"] == is_users
    assert called_in("", lambda: deeper(150))["in_user_code"], "between two calls"


class Reports(keras.layers.Layer):
    """A layer that reports where it is called, in eager steps."""

    def __init__(self, activity):
        super().__init__()
        self.activity, self.found = activity, []

    def call(self, inputs):
        self.activity._since -= 60.0
        self.found.append(self.activity.report()["in_user_code"])
        return inputs


def test_another_models_loop_in_a_callback_is_the_users_code_and_validation_is_not():
    activity = Activity()
    x = np.ones((4, 1), "float32")
    validated, others = Reports(activity), Reports(activity)
    other = keras.Sequential([others])
    other.compile(run_eagerly=True)
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: other.predict(x, verbose=0))
    with kdist.scope(micro_batches=2):
        model = keras.Sequential([keras.layers.Dense(1), validated])
        model.compile("sgd", "mse", run_eagerly=True)
    with activity.running("model.fit"):
        model.fit(x, x, batch_size=2, validation_data=(x, x), callbacks=[callback], verbose=0)
    assert (set(validated.found), set(others.found)) == ({False}, {True})


def test_a_call_whose_stack_is_missing_among_many_threads_is_not_taken_for_the_users_code():
    activity = Activity()
    activity._since -= 60.0
    ends = threading.Event()
    threads = [threading.Thread(target=ends.wait) for _ in range(120)]
    with contextlib.ExitStack() as until_read:
        until_read.callback(ends.set)
        for thread in threads:
            thread.start()
        between = activity.report()
        with activity.running("model.fit"):
            in_fit = activity.report()
    for thread in threads:
        thread.join()
    assert in_fit["stack"] == between["stack"] == [], "the main thread is the oldest, and was read"
    assert (in_fit["in_user_code"], between["in_user_code"]) == (False, True)


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
