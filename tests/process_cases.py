"""What `kdist`'s functions say and do on every rank; run by `test_process.py`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import kdist
from kdist._process import open_engine


def _engine():
    return open_engine(kdist.cluster_info())


def case_who_am_i() -> None:
    engine = _engine()
    assert (kdist.rank(), kdist.size()) == (engine.rank, engine.size)
    assert (kdist.local_rank(), kdist.local_size()) == (engine.local_rank, engine.local_size)
    assert kdist.is_chief() == (engine.rank == 0)
    assert kdist.cluster_info().reason


def case_barrier_waits_for_the_last() -> None:
    if kdist.rank() == kdist.size() - 1:
        time.sleep(1.0)
    came = time.time()
    kdist.barrier()
    left = time.time()
    everyone = _engine().gather_objects([came, left])
    assert min(left for _, left in everyone) >= max(came for came, _ in everyone)


def _shared_directory() -> Path:
    return Path(_engine().broadcast_object(tempfile.mkdtemp() if kdist.rank() == 0 else None))


def case_chief_goes_first() -> None:
    for per_host in (True, False):
        done = _shared_directory() / "done"
        with kdist.chief_first(per_host=per_host):
            # What the chief leaves behind is whole before anyone else looks.
            assert done.exists() == (kdist.rank() != 0)
            if kdist.rank() == 0:
                time.sleep(0.5)
                done.write_text("whole")
            assert done.read_text() == "whole"
        kdist.barrier()


def case_the_engine_is_one() -> None:
    assert _engine() is open_engine(kdist.cluster_info(), "mpi")
