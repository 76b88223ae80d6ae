"""A part of Keras' own tests, as CI runs it: all of it passes plainly, and on two ranks in the scope."""

import json
import os
import tarfile
from pathlib import Path

import keras
import pytest

from tests.helpers import needs, spmd
from tests.keras_suite.__main__ import run

FILES = (
    "layers/normalization/batch_normalization_test.py",
    "losses/loss_test.py",
    "metrics/reduction_metrics_test.py",
    "optimizers/optimizer_sparse_test.py",
)
LIMIT = 300  # seconds that a launch may take

pytestmark = [needs.keras_source, pytest.mark.starts_processes]


@pytest.mark.timeout(2 * LIMIT)
def test_they_pass_on_two_ranks(tmp_path):
    with tarfile.open(os.environ["KDIST_TEST_KERAS_SOURCE"]) as tar:
        tar.extractall(tmp_path, filter="data")
    root = Path(tmp_path, f"keras-{keras.__version__}", "keras", "src")
    found = run(root, FILES, ranks=2, timeout=LIMIT, packages=spmd.LEAN)
    assert {test.partition("::")[0] for test in found} == set(FILES)
    assert {test: result["why"] for test, result in found.items() if result["outcome"] != "passed"} == {}


@pytest.mark.parametrize(
    ("begun", "blamed"),
    [
        ({0: "a"}, ["a"]),  # the other rank has only collected
        ({}, ["a", "b", "c"]),
    ],
)
def test_a_job_that_ends_within_a_test_or_before_the_first_is_told_of(begun, blamed, monkeypatch, tmp_path):
    launches = []

    def launch(command, ranks, *, env, timeout):
        """The first job ends within a test, or before the first; the next one ends all."""
        request = json.loads(Path(env["KERAS_SUITE"]).read_text())
        launches.append(request["tests"])
        for rank in range(ranks):
            happened = [(test, "collected") for test in request["tests"]]
            if len(launches) > 1:
                happened += [(test, when) for test in request["tests"] for when in ("begins", "ends")]
            elif rank in begun:
                happened += [(begun[rank], "begins")]
            lines = [json.dumps({"test": test, "when": when}) for test, when in happened]
            Path(request["out"].replace("{rank}", str(rank))).write_text("".join(f"{line}\n" for line in lines))
        return spmd.Finished(9, "last words", False, 0.0)

    monkeypatch.setattr(spmd, "launch", launch)
    found = run(tmp_path, ["a_test.py"], ranks=2, timeout=1.0, tests=["a", "b", "c"])
    failed = [test for test, result in found.items() if result["outcome"] == "failed"]
    assert failed == blamed
    assert all("the job ended with 9\nlast words" in found[test]["why"] for test in failed)
    assert launches == [["a", "b", "c"], ["b", "c"]][: 1 + len(begun)]
