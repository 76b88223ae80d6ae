"""`kdist run --restarts` after each failure of each rank, over each engine, and trainings that other numbers of ranks
take up: `python -m tests.restarts.full`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers.campaign import Campaign
from tests.helpers.jobs import job
from tests.restarts import resized
from tests.restarts.trained import Trained, causes, train

WAYS = {"kill": "signal", "crash": "signal", "stop": "stall", "raise": "exception", "preempt": "preemption"}
"""How a rank fails, and the cause that must be found."""

ENGINES = {"mpi": "mpi", "mpich": "mpi", "horovod": "horovod", "collective": "collective"}
"""What a column is called, and the strategy."""

STALL = {"KDIST_STALL_TIMEOUT": "30"}  # seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the campaign; returns 0 if all passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.restarts.full", description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="how the ranks talk")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, "resize"], default=[*WAYS, "resize"])
    parser.add_argument("--ranks", nargs="+", type=int, choices=(0, 1), default=[0, 1], help="who fails")
    parser.add_argument("--out", type=Path, help="where the table goes, after each cell; shown as well")
    options = parser.parse_args(argv)
    campaign = Campaign(options.out)
    for engine in options.engines:
        ways = [way for way in options.ways if way in WAYS]
        whole = started(engine) if ways else None
        for way, rank in itertools.product(ways, options.ranks):
            check = functools.partial(broken, engine, way, rank, whole)
            campaign.attempt(way, f"rank {rank}", engine, check)
        if engine != "mpich" and "resize" in options.ways:
            campaign.attempt("resize", "3, 2, 3 ranks", engine, functools.partial(taken_up, engine))
    print(campaign.text())
    return 1 if campaign.errors else 0


def started(engine: str, *ways: str, env: Mapping[str, str] | None = None) -> Trained:
    """Trains over an engine, in a folder of its own."""
    python = os.environ["KDIST_TEST_MPICH_PYTHON"] if engine == "mpich" else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        return train(Path(folder), *ways, strategy=ENGINES[engine], python=python, env=env)


def broken(engine: str, way: str, rank: int, whole: Trained | None) -> str:
    """Breaks a training once, and asserts what must come of it; returns the time that was lost."""
    trained = started(engine, f"{way}@{rank}", env=STALL)
    assert causes(trained.attempts) == [(WAYS[way], rank), ("success", None)], trained.said[-6000:]
    assert whole is not None
    assert trained.differences(whole) == [], trained.said[-6000:]
    return f"{trained.attempts[0]['seconds_lost']:.0f} s lost"


def taken_up(engine: str) -> str:
    """Trains on 3, 2 and 3 ranks in turn, and asserts that it is as if nothing had been; returns the difference."""
    name = "horovod over mpi" if engine == "horovod" else engine
    with tempfile.TemporaryDirectory() as folder:
        for start, ranks in enumerate(resized.RANKS):
            ended = job(name, ranks).launch(["-m", resized.__name__, folder, str(start)], timeout=300)
            assert not ended.timed_out, ended.output[-6000:]
            assert ended.returncode == 0, ended.output[-6000:]
        found = [resized.difference(Path(folder), kind) for kind in resized.KINDS]
    assert max(found) < resized.TOLERANCE, found
    return f"{max(found):.0e}"


if __name__ == "__main__":
    sys.exit(main())
