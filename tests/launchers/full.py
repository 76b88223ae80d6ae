"""A small training in each way that README lists: `python -m tests.launchers.full --out FILE`, a table in Markdown.

On two ranks each, compared with one process; what is not installed here is told of. Slurm's two nodes are daemons of
this machine (`tests/helpers/slurm.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import keras
import tensorflow as tf

from tests.helpers import slurm
from tests.launchers.ways import WAYS, Missing, Way, alone

PASSED = "passed"


def main(argv: Sequence[str] | None = None) -> int:
    """Tries all ways; returns 0 if none failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.launchers.full", description=__doc__)
    parser.add_argument("--ways", nargs="+", default=[""], metavar="PART_OF_NAME", help="only ways with such names")
    parser.add_argument("--out", type=Path, help="where the table goes; shown as well")
    options = parser.parse_args(argv)
    chosen = [way for way in WAYS if any(each in way.name for each in options.ways)]
    expected = alone()
    outcomes: dict[Way, tuple[str, str]] = {}
    errors: list[str] = []
    with slurm_for(chosen) as env:
        for way in chosen:
            outcomes[way], error = tried(way, env, expected)
            errors += [f"## {way.name}\n\n```\n{error[-4000:]}\n```"] if error else []
            print(f"{way.name}: {outcomes[way][1]}", file=sys.stderr)
    text = "\n".join([table(outcomes), *errors]) + "\n"
    if options.out:
        options.out.write_text(text)
    print(text)
    return 1 if errors else 0


@contextlib.contextmanager
def slurm_for(ways: Sequence[Way]) -> Iterator[Mapping[str, str]]:
    """Yields the variables of a Slurm, which it starts if a way needs one and there is one."""
    if slurm.missing() or not any(way.needs_slurm for way in ways):
        yield {}
        return
    with slurm.running() as started:
        yield started.env


def tried(way: Way, env: Mapping[str, str], expected: list[float]) -> tuple[tuple[str, str], str]:
    """Returns versions and outcome of a way, and the error if it failed."""
    try:
        versions = way.versions()
    except Missing as error:
        return ("", f"not here: {error}"), ""
    try:
        way.check(env if way.needs_slurm else {}, expected)
    except (AssertionError, OSError, ValueError) as error:
        return (versions, "failed"), str(error)
    return (versions, PASSED), ""


def table(outcomes: Mapping[Way, tuple[str, str]]) -> str:
    """Returns the rows, under what all of them run on."""
    rows = [
        f"| {way.name} | `{way.command}` | {way.engine} | {versions} | {outcome} |"
        for way, (versions, outcome) in outcomes.items()
    ]
    return "\n".join(
        [
            f"{datetime.date.today()}: TensorFlow {tf.__version__}, Keras {keras.__version__}, "
            f"Python {platform.python_version()}; two ranks on one machine, against one process in float64, to 1e-9.",
            "",
            "| way | command | engine | versions | outcome |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
