"""A table that one process cannot hold under a limit of memory trains on two ranks that have the same limit each."""

import sys
from pathlib import Path

import pytest

from tests.helpers import spmd

SCRIPT = [sys.executable, str(Path(__file__).with_name("limited_memory.py"))]
# Freed memory goes back to the system, and threads' stacks count.
SETTINGS = {
    **{"TF_ENABLE_ONEDNN_OPTS": "0", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
    **{"TF_NUM_INTEROP_THREADS": "2", "TF_NUM_INTRAOP_THREADS": "2"},
}


@pytest.mark.starts_processes
@pytest.mark.timeout(400)
def test_two_ranks_train_what_one_process_cannot_hold():
    alone = spmd.execute(SCRIPT, env=SETTINGS, timeout=60)
    assert alone.returncode != 0, alone.output
    assert "OOM when allocating" in alone.output, alone.output
    together = spmd.launch(SCRIPT, 2, env=SETTINGS, timeout=60)
    assert together.returncode == 0, together.output
    assert together.output.count("TRAINED") == 2
