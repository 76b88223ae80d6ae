"""What the guide for Horovod's users shows runs under their launcher; `test_guide.py` runs it over MPI."""

import sys

from tests.docs import guide
from tests.helpers import needs, spmd

PAGE = guide.PAGES["migrating_from_horovod"].read_text()


def test_the_guide_shows_both():
    ((_, before),), ((_, after),) = guide.fences(PAGE, "py"), guide.fences(PAGE, "python")
    assert "hvd" in before
    assert "hvd" not in after


@needs.horovod
def test_what_it_shows_runs(tmp_path):
    script = tmp_path / "train.py"
    ((_, after),) = guide.fences(PAGE, "python")
    # The ranks run in the repository: the script's files go elsewhere.
    script.write_text(f"import os; os.chdir({str(tmp_path)!r})\n{after}")
    ended = spmd.launch(
        [sys.executable, str(script)], 2, launcher="horovodrun_gloo", env=spmd.EVERY_PACKAGE, timeout=150
    )
    assert ended.returncode == 0, ended.output
    assert "2 ranks train together over horovod" in ended.output
    assert {"model.keras", "last.keras"} <= {path.name for path in tmp_path.iterdir()}
