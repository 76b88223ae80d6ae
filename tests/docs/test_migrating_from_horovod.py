"""What the guide for Horovod's users shows runs, by horovodrun and by mpirun."""

import re
import sys

import pytest

from tests.helpers import needs, spmd

GUIDE = spmd.ROOT / "docs" / "migrating_from_horovod.md"


def blocks():
    """Returns the guide's Python by the title above it."""
    return dict(re.findall(r"## (\w+)\n\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL))


def test_the_guide_shows_both():
    assert set(blocks()) == {"Before", "After"}
    compile(blocks()["Before"], "before", "exec")
    assert "hvd" not in blocks()["After"]


@needs.horovod
@pytest.mark.parametrize("launcher", ["horovodrun_gloo", "mpirun"])
def test_what_it_shows_runs(launcher, tmp_path):
    script = tmp_path / "train.py"
    # The ranks run in the repository: the script's files go elsewhere.
    script.write_text(f"import os; os.chdir({str(tmp_path)!r})\n{blocks()['After']}")
    ended = spmd.launch([sys.executable, str(script)], 2, launcher=launcher, timeout=150)
    assert ended.returncode == 0, ended.output
    engine = "horovod" if launcher == "horovodrun_gloo" else "mpi"
    assert f"2 ranks train together over {engine}" in ended.output
    assert {"model.keras", "last.keras"} <= {path.name for path in tmp_path.iterdir()}
