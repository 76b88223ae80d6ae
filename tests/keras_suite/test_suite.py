"""A part of Keras' own tests, as CI runs it: those that pass plainly pass on two ranks in the scope."""

import os
import tarfile
from pathlib import Path

import keras
import pytest

from tests.helpers import needs, spmd
from tests.keras_suite.__main__ import run
from tests.keras_suite.expected import reason

FILES = (
    "layers/normalization/batch_normalization_test.py",
    "losses/loss_test.py",
    "metrics/reduction_metrics_test.py",
    "optimizers/optimizer_sparse_test.py",
)
LIMIT = 300  # seconds that a launch may take

pytestmark = [needs.keras_source, pytest.mark.starts_processes]


@pytest.mark.timeout(4 * LIMIT)
def test_what_passes_plainly_passes_on_two_ranks(tmp_path):
    with tarfile.open(os.environ["KDIST_TEST_KERAS_SOURCE"]) as tar:
        tar.extractall(tmp_path, filter="data")
    root = Path(tmp_path, f"keras-{keras.__version__}", "keras", "src")
    plain = run(root, FILES, ranks=1, timeout=LIMIT, packages=spmd.LEAN)
    todo = [test for test, result in plain.items() if result["outcome"] == "passed" and not reason(test)]
    assert {test.partition("::")[0] for test in todo} == set(FILES)
    found = run(root, FILES, ranks=2, timeout=LIMIT, tests=todo, packages=spmd.LEAN)
    assert {test: found[test]["why"] for test in todo if found[test]["outcome"] != "passed"} == {}
