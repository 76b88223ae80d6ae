"""Files that all ranks write, download and read at the same time: the cases of behaviours_files.py, on 3 ranks."""

import pytest

from tests.helpers import spmd
from tests.training import behaviours_files as cases
from tests.training.behaviours_saving import FOLDER

TARGET = f"{cases.__name__}:CASES"


@pytest.fixture(scope="module")
def launched(request, tmp_path_factory):
    only, env = spmd.selected(request), {FOLDER: str(tmp_path_factory.mktemp("files"))}
    return spmd.run(TARGET, 3, only=only, env=env, timeout=400)


@pytest.mark.parametrize("case", spmd.names(TARGET))
def test_case(launched, case):
    launched.check(case)
