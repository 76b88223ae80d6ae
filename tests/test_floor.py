"""The oldest TensorFlow and Keras that setup.cfg allows, in an environment of their own: a covering part of the suites.

`KDIST_TEST_FLOOR_PYTHON` names its interpreter; `bash tests/run` makes the environment.
"""

import os
import subprocess

import pytest

from tests.training.covering import COVERING, launched_by

PYTHON = os.environ.get("KDIST_TEST_FLOOR_PYTHON", "")

pytestmark = pytest.mark.skipif(not PYTHON, reason="KDIST_TEST_FLOOR_PYTHON names no environment")


def test_this_is_the_floor():
    """The versions are the lowest that setup.cfg allows."""
    code = "from importlib.metadata import version; print(version('tensorflow'), version('keras'))"
    said = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    tensorflow, keras = said.split()
    assert tensorflow.startswith("2.20.")
    assert keras.startswith("3.12.")


launched = launched_by(PYTHON)


@pytest.mark.parametrize("case", COVERING)
def test_case(launched, case):
    launched.check(case)
