"""Trainings that break at random, again and again: `python -m tests.restarts.random_faults --out FILE`.

Each seed is one training of two ranks over one engine under `kdist run --restarts`, cold or with `--standby`. Each of
its starts breaks once: one kind of fault, on one rank, in one step and some milliseconds, drawn from the seed. Where
`kdist run` gives up, as it does after two attempts without a new checkpoint, it is started again, as its user would. In
the end the training must equal one that never broke, bit for bit; no attempt may lose more steps than it saves at
once, nothing may hang, and no process may be left, nor a file of kdist in `/dev/shm`. Parts go on in one
file: `--seeds 0 100`, then `--seeds 100 200`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.campaign import ends_at_sigterm
from tests.restarts.full import STALL, started
from tests.restarts.trained import LIMIT, Trained, result_of, run

ENGINES = ("mpi", "collective", "horovod")
KINDS = ("kill", "crash", "stop", "raise", "preempt")
NUM_FAULTS = 5  # of a training
NUM_STEPS = 18  # of a whole training
SAVED_EACH = 2  # steps
OTHERS_END = 120  # seconds in which another job's files are gone
LONGEST_DELAY = 0.15  # seconds after a step, in which a few more are made
MAX_COMMANDS = NUM_FAULTS + 1
FOLDER = "KDIST_TEST_FAULTS"  # an environment variable of all processes of a training


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a seed stands for.

    Attributes:
        engine: str, one of `ENGINES`.
        standby: bool, whether the next attempt waits.
        ways: tuple of str, how each start breaks; see `tests.restarts.training`.
    """

    engine: str
    standby: bool
    ways: tuple[str, ...]


def plan_of(seed: int) -> Plan:
    """Returns what a seed stands for.

    Example:
    >>> plan_of(0).engine, plan_of(1).engine, plan_of(3).standby
    ('mpi', 'collective', True)
    """
    draws = random.Random(seed)
    ways = []
    for _ in range(NUM_FAULTS):
        kind, rank = draws.choice(KINDS), draws.randrange(2)
        # An attempt has the steps that are left, so early ones are likelier to come.
        step, delay = draws.randrange(draws.randrange(1, NUM_STEPS)), LONGEST_DELAY * draws.random() ** 2
        ways.append(f"{kind}@{rank}:{step}+{delay:.3f}")
    return Plan(ENGINES[seed % 3], seed // 3 % 2 == 1, tuple(ways))


def broken(plan: Plan, whole: Trained, folder: Path) -> list[dict[str, Any]]:
    """Trains as a plan says, and asserts what must come of it; returns all attempts."""
    attempts: list[dict[str, Any]] = []
    options = ("--restarts", "2", "--strategy", plan.engine, *(["--standby"] if plan.standby else []))
    program = ("-m", "tests.restarts.training", str(folder), *plan.ways)
    in_memory = set(Path("/dev/shm").glob("kdist*"))  # MPI leaves files of its own where it is killed
    for number in range(MAX_COMMANDS):
        output = folder / f"out{number}"
        done = run(*options, "--output", str(output), *program, timeout=LIMIT * 2, env={**STALL, FOLDER: str(folder)})
        summary = output / "restarts.json"
        assert summary.exists(), f"there is no summary\n{done.output[-4000:]}"
        attempts += json.loads(summary.read_text())["attempts"]
        if done.returncode == 0:
            break
    else:
        raise AssertionError(f"not done after {MAX_COMMANDS} commands\n{done.output[-4000:]}")
    for way, each in zip(plan.ways, attempts, strict=False):
        lost = each["steps_lost"]
        assert lost is not None, f"nobody knows how many steps were lost\n{each}"
        assert lost <= SAVED_EACH, f"{lost} steps were lost\n{each}"
        rank = int(way.partition("@")[2][0])
        assert each["cause"] in ("success", "preemption") or each["rank"] == rank, (
            f"{way} was broken, but blamed {each}"
        )
    differences = Trained(attempts, result_of(folder), done.output).differences(whole)
    assert not differences, f"{differences} differ\n{done.output[-4000:]}"
    left = processes_of(folder)
    assert not left, f"processes are left: {left}"
    deadline = time.monotonic() + OTHERS_END
    while (files := set(Path("/dev/shm").glob("kdist*")) - in_memory) and time.monotonic() < deadline:
        time.sleep(1)  # they may be of another job on this machine
    assert not files, f"files are left: {files}"
    return attempts


def processes_of(folder: Path) -> list[str]:
    """Returns the command lines of all processes that were started to train in a folder, launchers among them."""
    lines = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if f"{FOLDER}={folder}".encode() in (place / "environ").read_bytes().split(b"\0"):
                lines.append((place / "cmdline").read_text().replace("\0", " "))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Runs some seeds; returns 0 if all passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.restarts.random_faults", description=__doc__)
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 200), metavar=("FIRST", "END"))
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON lines, one a seed, which are added to; see --table"
    )
    parser.add_argument("--table", type=Path, help="where the table of all seeds in OUT goes, in Markdown")
    options = parser.parse_args(argv)
    whole: dict[str, Trained] = {}
    for seed in range(*options.seeds):
        plan = plan_of(seed)
        whole[plan.engine] = whole.get(plan.engine) or started(plan.engine)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, ends_at_sigterm():
            try:
                attempts, error = broken(plan, whole[plan.engine], Path(folder)), ""
            except Exception as failed:  # the next seed is another training
                attempts, error = [], str(failed) if isinstance(failed, AssertionError) else traceback.format_exc()
        came = [[each["cause"], each["steps_lost"], each["seconds_lost"]] for each in attempts]
        line = {"seed": seed, **dataclasses.asdict(plan), "attempts": came, "error": error}
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"seed {seed}: {error or came} after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    lines = [json.loads(line) for line in options.out.read_text().splitlines()]
    text = table(lines)
    print(text)
    if options.table:
        options.table.write_text(text)
    return int(any(line["error"] for line in lines))


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    """Returns what came of all seeds: a row an engine and way of restarting, a column a cause."""
    lines = list(lines)
    causes = collections.Counter(cause for line in lines for cause, _, _ in line["attempts"] if cause != "success")
    num_failed = sum(bool(line["error"]) for line in lines)
    head = ["engine", "next attempt", "trainings", *causes, "steps lost, most", "failed"]
    rows = []
    for engine in ENGINES:
        for standby in (False, True):
            some = [line for line in lines if (line["engine"], line["standby"]) == (engine, standby)]
            here = collections.Counter(cause for line in some for cause, _, _ in line["attempts"])
            lost = max((steps or 0 for line in some for _, steps, _ in line["attempts"]), default=0)
            failed = sum(bool(line["error"]) for line in some)
            cells = [
                engine,
                "standby" if standby else "cold",
                len(some),
                *(here[each] for each in causes),
                lost,
                failed,
            ]
            rows.append([str(cell) for cell in cells])
    described = (
        f"{sum(causes.values())} faults in {len(lines)} trainings of 2 ranks; {num_failed} trainings failed. The "
        "columns after `trainings` count attempts by the cause that kdist named."
    )
    lined = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    errors = [f"## Seed {line['seed']}\n\n```\n{line['error'][-3000:]}\n```\n" for line in lines if line["error"]]
    return "\n".join([described, "", *lined, "", *errors])


if __name__ == "__main__":
    sys.exit(main())
