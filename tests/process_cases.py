"""The functions of `kdist` on every rank; run by `test_three_ranks.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import kdist
from kdist import _process
from kdist._engine import open_engine
from tests.helpers.logs import logged


def _engine():
    return open_engine(kdist.cluster_info())


def case_who_am_i() -> None:
    engine = _engine()
    assert (kdist.rank(), kdist.size()) == (engine.rank, engine.size)
    assert (kdist.local_rank(), kdist.local_size()) == (engine.local_rank, engine.local_size)
    assert kdist.is_chief() == (engine.rank == 0)
    assert kdist.cluster_info().reason


def case_what_a_rank_starts_is_not_that_rank() -> None:
    _engine()
    if kdist.rank() == 0:
        code = "import kdist\nwith kdist.scope(): print('opened')"
        alone = {**os.environ, "KDIST_STRATEGY": "single"}
        refused, spawned, opened = (
            subprocess.run([sys.executable, "-c", code, word], env=env, timeout=120, capture_output=True, text=True)
            for word, env in (("", None), ("--multiprocessing-fork", None), ("", alone))
        )
        assert refused.returncode, refused
        assert spawned.returncode, spawned
        assert "was started by that rank" in refused.stderr, refused
        assert "KDIST_STRATEGY=single" in refused.stderr, refused
        assert '`if __name__ == "__main__":`' in spawned.stderr, spawned
        assert opened.stdout == "opened\n", opened


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


def case_chief_goes_first_of_hosts_too() -> None:
    """Hosts may share a disk. Here ranks 1 and 2 are on another host."""
    engine, info = _engine(), kdist.cluster_info()
    on_two_hosts = dataclasses.replace(info, local_rank=max(0, info.rank - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_process, "cluster_info", lambda: on_two_hosts)
        with kdist.chief_first():
            came = time.time()
            time.sleep(0.3)
            left = time.time()
    everyone = engine.gather_objects([came, left])
    for before, after in itertools.pairwise(everyone):
        assert before[1] <= after[0], everyone


def case_a_chief_that_raises_says_so_and_lets_the_others_go() -> None:
    raises = pytest.raises(OSError, match="no network") if kdist.is_chief() else contextlib.nullcontext()
    with logged() as said, raises, kdist.chief_first():
        if kdist.is_chief():
            raise OSError("no network")
    told = ["kdist.chief_first: rank 0 raised OSError: no network"]
    assert _engine().gather_objects(said) == [told, *[[]] * (kdist.size() - 1)]


def case_the_engine_is_one() -> None:
    assert _engine() is open_engine(kdist.cluster_info(), "mpi")
