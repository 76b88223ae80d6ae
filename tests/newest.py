"""The newest TensorFlow and Keras of the index, pre-releases too: the covering part of the fidelity suite.

`bash tests/run --newest` makes the environment and runs this file. What fails here is shown, and does not fail a run:
kdist may have to be changed before these versions are released.
"""

import os
import re

import pytest

from tests.helpers import spmd
from tests.training.covering import COVERING, launched_by

PYTHON = os.environ.get("KDIST_TEST_NEWEST_PYTHON", "")


launched = launched_by(PYTHON)


@pytest.mark.parametrize("case", COVERING)
def test_case(launched, case):
    launched.check(case)


def test_private_names_are_there():
    done = spmd.execute([PYTHON, "-m", "kdist.cli.main", "env"], timeout=120)
    assert re.search(r"internals +all found", done.output), done.output
