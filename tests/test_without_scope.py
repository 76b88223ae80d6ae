"""Several ranks that train without a scope, on purpose; those that do so by accident: `tests/transcripts`."""

import dataclasses
import gc
import importlib
import logging
import re
import sys

import keras
import numpy as np
import pytest

import kdist
from kdist import _unscoped_fit
from kdist.cluster.info import ClusterInfo
from kdist.keras_hooks.trainer import watch_first_fit
from kdist.reports.failure import EarlyHook
from kdist.reports.scope_marks import Marks, OwnScopes, SlowStart, read, read_report
from tests.helpers import spmd
from tests.helpers.logs import logged

RUN = [sys.executable, "-m", "kdist.cli.main", "run", "-np", "2"]
ON_PURPOSE = """
import kdist, keras, numpy as np
def train():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
with kdist.scope("single"):
    train()
train()
"""


def test_separate_trainings_on_purpose_are_not_told_of(tmp_path):
    (script := tmp_path / "train.py").write_text(ON_PURPOSE)
    done = spmd.execute([*RUN, str(script)], timeout=300)
    assert done.returncode == 0, done.output
    assert "outside" not in done.output
    assert "entered" not in done.output


@pytest.mark.parametrize("word", ["short", "full"])
def test_an_error_before_the_scope_is_printed_once(tmp_path, word):
    """Under mpirun alone, without `kdist run`."""
    (script := tmp_path / "train.py").write_text("import kdist\nbreakpoint()\nkdist.AllReduce(compression='fp8')\n")
    done = spmd.launch([sys.executable, str(script)], 2, env={"KDIST_TRACEBACK": word}, timeout=60)
    assert done.returncode == 1, done.output
    assert done.output.count("StrategyError: An option is invalid") == 1, done.output
    assert ("options.py" in done.output) == (word == "full")
    assert done.output.count("[kdist] breakpoint() in train.py:2 is skipped: 2 ranks") == 1, done.output


@pytest.mark.parametrize("end", ["sys.exit(3)", "sys.exit('no data')"])
def test_an_exit_before_the_scope_is_told_of(end, tmp_path):
    """Under mpirun alone, which names no script; in the scope the engine tells of it."""
    (script := tmp_path / "train.py").write_text(f"import sys\nimport kdist\nif kdist.rank() == 1:\n    {end}\n")
    done = spmd.launch([sys.executable, str(script)], 2, timeout=60)
    code = 3 if "3" in end else 1
    assert done.returncode == code, done.output
    assert re.search(
        rf"rank 1 of 2 on host \S+ exits with code {code} before kdist.scope\(\), in train.py:4\n", done.output
    )


def test_a_good_exit_without_a_scope_is_no_news(tmp_path):
    (script := tmp_path / "train.py").write_text("import sys\nimport kdist\nsys.exit(0)\n")
    done = spmd.launch([sys.executable, str(script)], 2, timeout=60)
    assert done.returncode == 0, done.output
    assert "exits" not in done.output


def test_a_command_of_kdist_is_no_script_that_exits():
    """`srun kdist run` is one of several processes, too."""
    done = spmd.launch([sys.executable, "-m", "kdist.cli.main", "run", "/nowhere.py"], 2, timeout=60)
    assert done.returncode == 2, done.output
    assert "The script does not exist" in done.output, done.output
    assert "before kdist.scope()" not in done.output, done.output


# Without a launcher.


def test_in_one_process_nothing_is_registered(monkeypatch, caplog):
    before, fit, hook = list(sys.meta_path), keras.Model.fit, sys.breakpointhook
    _unscoped_fit.watch({})
    _unscoped_fit.watch({"TF_CONFIG": "not JSON"})
    assert sys.meta_path == before
    assert keras.Model.fit is fit
    assert not isinstance(sys.excepthook, EarlyHook)
    assert sys.breakpointhook is hook
    with caplog.at_level(logging.WARNING, "kdist"):
        kdist.scope()
        gc.collect()
    assert not caplog.records


def test_callbacks_of_a_fit_outside_are_seen_at_any_place():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, given, seen = np.ones((2, 1)), [keras.callbacks.Callback()], []
    fit = keras.Model.fit
    watch_first_fit(lambda callbacks: len(seen.append(callbacks) or seen) == 3)
    model.fit(x, x, 2, 1, 0, given)
    model.fit(x, x, verbose=0, callbacks=given)
    model.fit(x, x, verbose=0)
    assert seen == [given, given, None]
    assert keras.Model.fit is fit


def test_after_the_warning_fit_is_kerass_own_again(monkeypatch):
    monkeypatch.setattr(_unscoped_fit, "own_scopes", OwnScopes())
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, fit = np.ones((2, 1)), keras.Model.fit
    with logged(logging.WARNING) as lines:
        _unscoped_fit._watch_keras(ClusterInfo(launcher="openmpi", size=2))
        assert keras.Model.fit is not fit
        for _ in range(2):
            model.fit(x, x, verbose=0)
            assert keras.Model.fit is fit
    [warning] = lines
    assert warning.startswith("fit runs outside of kdist.scope(): each of the 2 ranks")


def test_a_function_is_called_after_an_import(tmp_path, monkeypatch):
    (tmp_path / "a_late_package.py").write_text("VALUE = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    before, seen = list(sys.meta_path), []
    _unscoped_fit.after_import("a_late_package", lambda: seen.append(sys.modules["a_late_package"].VALUE))
    assert importlib.util.find_spec("a_late_package") is not None  # a look is no import
    assert not seen
    module = importlib.import_module("a_late_package")
    assert seen == [1]
    assert sys.meta_path == before
    assert "exec_module" not in vars(module.__spec__.loader)
    _unscoped_fit.after_import("a_late_package", lambda: seen.append(2))
    assert seen == [1, 2]


@pytest.mark.parametrize(
    ("ranks", "problem", "remark"),
    [
        ({0: "waits", 1: "ends"}, True, False),
        ({0: "waits", 1: "waits"}, False, False),
        ({0: "alone", 1: "ends"}, False, False),
        ({0: "ends", 1: "ends"}, False, True),
        ({0: "ends without Keras", 1: "ends without Keras"}, False, False),
    ],
)
def test_what_follows_from_the_marks_of_ranks(ranks, problem, remark, tmp_path):
    for rank, what in ranks.items():
        own = OwnScopes()
        own.begins(tmp_path, rank)
        if what == "waits":
            with own.entered({}):
                own.waits_for_others()
        elif what == "alone":
            own.mark_alone()
        own.script_ended(used_keras="without" not in what)
    marks = read(str(tmp_path))
    assert bool(marks.problem()) == problem
    assert bool(marks.remark()) == remark
    assert (marks.begun, marks.reached) == (True, "waits" in ranks.values())


def test_a_scope_is_a_decorator_and_can_be_opened_again():
    @kdist.scope()
    def opened():
        with pytest.raises(kdist.errors.ScopeError):
            kdist.scope().__enter__()
        return 1

    assert opened() + opened() == 2


def test_a_start_that_takes_long_is_told_of_once():
    elsewhere = Marks((), (), (), False)
    none, reached = (dataclasses.replace(elsewhere, begun=True, reached=reached) for reached in (False, True))
    start = SlowStart(patience=0.0)
    assert start.remark(elsewhere) == ""  # one rank, or all of them on other hosts: nothing is known of them
    assert start.remark(none).startswith("no rank has reached kdist.scope() for 0 s")
    assert start.remark(none) == ""
    start = SlowStart(patience=0.0)
    assert start.remark(reached) == start.remark(none) == ""
    assert SlowStart(patience=60.0).remark(none) == ""


def test_the_first_report_of_a_failure_is_kept(tmp_path):
    assert read_report(str(tmp_path)) == ""
    for rank in range(2):
        OwnScopes(directory=tmp_path, rank=rank).failed(f"rank {rank} raised")
    OwnScopes().failed("no directory")
    assert read_report(str(tmp_path)) == "rank 0 raised"
    assert read(str(tmp_path)) == Marks((), (), (), False)
