"""The oldest TensorFlow and Keras that setup.cfg allows, in an environment of their own: a covering part of the suites.

`KDIST_TEST_FLOOR_PYTHON` names its interpreter; `bash tests/run` makes the environment.
"""

import itertools
import os
import subprocess

import pytest

from tests.helpers import spmd
from tests.training import fidelity

PYTHON = os.environ.get("KDIST_TEST_FLOOR_PYTHON", "")

pytestmark = pytest.mark.skipif(not PYTHON, reason="KDIST_TEST_FLOOR_PYTHON names no environment")

# Each optimizer, each kind of sizes and each kind of input at least once.
CELLS = [
    f"{optimizer}-{shape}-{kind}"
    for optimizer, shape, kind in zip(
        fidelity.OPTIMIZERS, itertools.cycle(fidelity.SHAPES), itertools.cycle(fidelity.KINDS), strict=False
    )
]


def test_this_is_the_floor():
    """The versions are the lowest that setup.cfg allows."""
    code = "import keras, tensorflow; print(tensorflow.__version__, keras.__version__)"
    said = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    tensorflow, keras = said.split()
    assert tensorflow.startswith("2.20.")
    assert keras.startswith("3.12.")


# What takes hold of Keras' inner parts: each wrapper of ARCHITECTURE.md at least once.
FEATURES_HERE = (
    "steps_per_execution",
    "run_eagerly",
    "sequences_of_unknown_length",
    "loss_reductions",
    "losses_that_leave_out_a_class",
    "regularizers_and_add_loss",
    "gradient_accumulation",
    "loss_scale",
    "synchronized_batch_normalization",
    "exact_metrics",
    "two_optimizers",
    "on_batch",
    "predictions_of_a_dataset",
    "adopted",
)


@pytest.fixture(scope="module")
def launched(request):
    return spmd.run("tests.training.all_cases:CASES", 2, only=spmd.selected(request), python=PYTHON, timeout=570)


@pytest.mark.parametrize("case", [*CELLS, *FEATURES_HERE])
def test_case(launched, case):
    launched.check(case)
