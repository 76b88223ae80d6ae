"""A part of Keras' own tests, as CI runs it: all of it passes plainly, and on two ranks in the scope."""

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
