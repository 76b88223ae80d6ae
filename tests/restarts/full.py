"""`kdist run --restarts` after each failure of each rank, over each engine, cold, with `--standby` and, over MPI, with
`--heal in-process`, and trainings that other numbers of ranks take up: `python -m tests.restarts.full`.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from tests.restarts.trained import Trained, causes, heal, healings, train


@dataclasses.dataclass(frozen=True)
class Way:
    """How a training breaks.

    Attributes:
        cause: str, which must be found.
        starts: tuple of str, how each start breaks, as for `tests.restarts.training`; without the rank.
        who: tuple of int, the ranks that may break.
        is_blamed: bool, whether the rank must be named.
        is_healed: bool, whether the others go on in their processes, if they are asked to.
    """

    cause: str
    starts: tuple[str, ...]
    who: tuple[int, ...] = (0, 1)
    is_blamed: bool = True
    is_healed: bool = False


WAYS = {
    "kill": Way("signal", ("kill@{}",), is_healed=True),
    "crash": Way("signal", ("crash@{}",), is_healed=True),
    "stop": Way("stall", ("stop@{}",)),
    "raise": Way("exception", ("raise@{}",)),
    "preempt": Way("preemption", ("preempt@{}",)),
    "kill while starting": Way("signal", ("kill@{}:0",), is_healed=True),
    "kill, and again while starting": Way("signal", ("kill@{}", "kill@{}:0"), is_healed=True),
    "kill while saving": Way("signal", ("saving@{}",), who=(0,), is_healed=True),
    "full disk": Way("exception", ("full@{}",), who=(0,)),
    "kill the launcher": Way("signal", ("launcher@{}",), who=(0,), is_blamed=False),
}
"""How a training breaks, by what the table calls it."""

ENGINES = {"mpi": "mpi", "mpich": "mpi", "horovod": "horovod", "collective": "collective"}
"""What a column is called, and the strategy."""

NEXT = {"cold": (), "standby": ("--standby",)}
"""How the next attempt is started, and the options for it."""

IN_PROCESS = "in-process"
"""What it is called where the others go on in their processes, over MPI."""

STALL = {"KDIST_STALL_TIMEOUT": "30"}  # seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the campaign; returns 0 if all passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.restarts.full", description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="how the ranks talk")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, "resize"], default=[*WAYS, "resize"])
    parser.add_argument("--ranks", nargs="+", type=int, choices=(0, 1), default=[0, 1], help="who fails")
    all_next = [*NEXT, IN_PROCESS]
    parser.add_argument("--next", nargs="+", choices=all_next, default=all_next, help="how the next attempt is started")
    parser.add_argument("--out", type=Path, help="where the table goes, after each cell; shown as well")
    options = parser.parse_args(argv)
    campaign = Campaign(options.out)
    for engine in options.engines:
        ways = [way for way in options.ways if way in WAYS]
        hows = [how for how in options.next if how in NEXT]
        whole = started(engine) if ways and hows else None
        for way, rank, how in itertools.product(ways, options.ranks, hows):
            if rank in WAYS[way].who:
                check = functools.partial(broken, engine, WAYS[way], rank, whole, NEXT[how])
                campaign.attempt(way, f"rank {rank}", f"{engine}{', standby' * (how == 'standby')}", check)
        for way, rank in itertools.product(ways, options.ranks):
            if engine == "mpi" and IN_PROCESS in options.next and rank in WAYS[way].who:
                check = functools.partial(healed, WAYS[way], rank)
                campaign.attempt(way, f"rank {rank}", f"{engine}, {IN_PROCESS}", check)
        if engine != "mpich" and "resize" in options.ways:
            campaign.attempt("resize", "3, 2, 3 ranks", engine, functools.partial(taken_up, engine))
    print(campaign.text())
    return 1 if campaign.errors else 0


def started(engine: str, *ways: str, env: Mapping[str, str] | None = None, options: Sequence[str] = ()) -> Trained:
    """Trains over an engine, in a folder of its own."""
    python = os.environ["KDIST_TEST_MPICH_PYTHON"] if engine == "mpich" else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        return train(Path(folder), *ways, strategy=ENGINES[engine], python=python, env=env, options=options)


def broken(engine: str, way: Way, rank: int, whole: Trained | None, options: Sequence[str] = ()) -> str:
    """Breaks a training, and asserts what must come of it; returns the time that was lost."""
    starts = [each.format(rank) for each in way.starts]
    # One that dies while it starts makes no checkpoint, which would give the restart back.
    trained = started(engine, *starts, env=STALL, options=("--restarts", str(len(starts)), *options))
    blamed = (way.cause, rank if way.is_blamed else None)
    assert causes(trained.attempts) == [*[blamed] * len(starts), ("success", None)], trained.said[-6000:]
    assert whole is not None
    assert trained.differences(whole) == [], trained.said[-6000:]
    return f"{sum(each['seconds_lost'] for each in trained.attempts):.0f} s lost"


def healed(way: Way, rank: int) -> str:
    """Breaks a training of three ranks, of which two go on, and asserts what must come of it; returns the time lost.

    What cannot be healed is started again, on three ranks: a second loss, too, which would leave one rank.
    """
    starts = [each.format(rank) for each in way.starts]
    with tempfile.TemporaryDirectory() as folder:
        said, attempts = heal(Path(folder), *starts, ranks=3, restarts=len(starts), env=STALL)
    num_restarts = len(starts) - way.is_healed
    blamed = (way.cause, rank if way.is_blamed else None)
    assert causes(attempts) == [*[blamed] * num_restarts, ("success", None)], said[-6000:]
    lost = [[([rank], 2)] if way.is_healed else [], *[[]] * num_restarts]
    assert healings(attempts) == lost, said[-6000:]
    seconds = [each["seconds_lost"] for attempt in attempts for each in (attempt, *attempt["healings"])]
    return f"{sum(seconds):.0f} s lost"


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
