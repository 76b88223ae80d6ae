"""Every case of every callback on every job, and many interruptions: `python -m tests.callbacks.full --out FILE`.

Each case runs on 2 and 3 ranks, over MPI and, where Horovod is installed, over Horovod with Gloo; a table in Markdown.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.callbacks import all_cases, cases_resume
from tests.callbacks.interrupted_training import KILL, WRITERS
from tests.callbacks.interruptions import interrupt_training, kill_model_saver, kill_saver, preempt_training
from tests.helpers import spmd
from tests.helpers.campaign import Campaign
from tests.helpers.jobs import ENGINES, Job, job
from tests.training import behaviours_callbacks, behaviours_saving

TARGETS = {
    "callbacks": f"{all_cases.__name__}:CASES",
    "in fit": f"{behaviours_callbacks.__name__}:CASES",
    "saving": f"{behaviours_saving.__name__}:CASES",
}
PARTS = (*TARGETS, "resume", "interruptions")
RESUME, RESUME_ALONE = (f"{cases_resume.__name__}:{cases}" for cases in ("EVERYTHING", "ALONE"))
LEFT, TAKEN_UP = "left_for_others", "taken_up_by_others"
ENDS = [(KILL, KILL), *((writer, KILL) for writer in WRITERS)]
HAS_HOROVOD = importlib.util.find_spec("horovod") is not None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the campaign; returns 0 if all passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.callbacks.full", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3], metavar="N")
    engines = ["mpi", *(["horovod over gloo"] if HAS_HOROVOD else [])]
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=engines, help="how the ranks talk")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts of the campaign")
    parser.add_argument("--cases", nargs="+", default=[""], metavar="PART_OF_NAME", help="only cases with such names")
    parser.add_argument("--moments", type=int, default=200, help="how often a save is killed")
    parser.add_argument("--trainings", type=int, default=20, help="how many trainings are interrupted twice each")
    parser.add_argument("--out", type=Path, help="where the table goes; shown as well")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a launch may take")
    options = parser.parse_args(argv)
    campaign = Campaign(options.out)
    with tempfile.TemporaryDirectory() as folder:
        jobs = {(engine, ranks): job(engine, ranks) for engine in options.engines for ranks in options.ranks}
        for part in (part for part in TARGETS if part in options.only):
            for way, on in jobs.items():
                names = chosen(spmd.names(TARGETS[part]), options.cases)
                (saved := Path(folder, f"saved {column(*way)}")).mkdir(exist_ok=True)
                env = {behaviours_saving.FOLDER: str(saved)}
                campaign.run(part, column(*way), on, TARGETS[part], names, timeout=options.timeout, env=env)
        if "resume" in options.only:
            # What 2 ranks leave, 3 and one process take up: of each engine its own.
            alone = {("mpi", 1): Job("mpirun", 1)} if "mpi" in options.engines else {}
            for way, on in {**jobs, **alone}.items():
                env = {cases_resume.FOLDER: str(Path(folder, way[0]))}
                names = chosen(resumed_by(on.ranks, (way[0], 2) in jobs), options.cases)
                target = RESUME_ALONE if on.ranks == 1 else RESUME
                campaign.run("resume", column(*way), on, target, names, timeout=options.timeout, env=env)
        if "interruptions" in options.only:
            _interrupt(campaign, Path(folder), options.moments, options.trainings, jobs)
    print(campaign.text())
    return 1 if campaign.errors else 0


def column(engine: str, ranks: int) -> str:
    """Returns what a job is called in the table."""
    return "one process" if ranks == 1 else f"{engine}, {ranks} ranks"


def resumed_by(ranks: int, is_left: bool) -> list[str]:
    """Returns the cases of resuming for a number of ranks."""
    if ranks == 2:
        return [name for name in cases_resume.EVERYTHING if name != TAKEN_UP]
    names = cases_resume.ALONE if ranks == 1 else cases_resume.EVERYTHING
    return [name for name in names if name != LEFT and (is_left or name != TAKEN_UP)]


def chosen(names: Sequence[str], parts: Sequence[str]) -> list[str]:
    """Returns the names that contain one of the parts."""
    return [name for name in names if any(part in name for part in parts)]


def _interrupt(
    campaign: Campaign, folder: Path, moments: int, trainings: int, jobs: dict[tuple[str, int], Job]
) -> None:
    part = "interruptions"
    savers = {"BackupAndRestore": kill_saver, "ModelCheckpoint": kill_model_saver}
    for name, kill in savers.items():
        (folder / name).mkdir()
        title = f"{name} killed {moments} times while it saves"
        campaign.attempt(part, title, "one process", functools.partial(kill, folder / name, moments, seed=1))
    for way, on in {("mpi", 1): Job("mpirun", 1), **jobs}.items():
        place = folder / f"preempted {column(*way)}"
        campaign.attempt(part, "told to go", column(*way), functools.partial(preempt_training, place, on))
    ways = itertools.cycle(itertools.product(ENDS, jobs.items()))
    for seed, (ends, (way, on)) in zip(range(trainings), ways, strict=False):
        title = f"training {seed}, ended by {', then '.join(ends)}"
        interrupt = functools.partial(interrupt_training, folder / str(seed), ends, seed, on)
        campaign.attempt(part, title, column(*way), interrupt)


if __name__ == "__main__":
    sys.exit(main())
