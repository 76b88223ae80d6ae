"""What ranks hold over 10,000 steps: `python -m tests.endurance.full [--steps N] [--engines ...] [--out FILE]`.

Memory must be flat after warm-up, open files and threads constant.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.endurance import script
from tests.helpers.jobs import ENGINES, job

RANKS = 3
WARM_UP = 5  # of the samples: TensorFlow's allocator and thread pools grow until then
SLACK = 3072  # KB that memory may move without a trend: the allocator's pages
SLOPE = 0.5  # KB a step; a tensor that is kept in each step is more

Samples = list[dict[str, int]]


def measure(engine: str, steps: int, timeout: float, ranks: int = RANKS) -> dict[int, Samples]:
    """Trains, and returns what each rank held."""
    ended = job(engine, ranks).launch(["-m", script.__name__, str(steps)], timeout=timeout)
    assert ended.returncode == 0, ended.output
    found = re.findall(r"held (\d) (\[.*?\])", ended.output)
    assert {int(rank) for rank, _ in found} == set(range(ranks)), ended.output
    return {int(rank): json.loads(samples) for rank, samples in found}


def check(samples: Samples, steps: int) -> None:
    """Asserts that nothing grows with the steps."""
    first, *_, last = steady = samples[WARM_UP:]
    for what in ("files", "threads"):
        counts = [sample[what] for sample in steady]
        assert len(set(counts)) == 1, f"{what}: {counts}"
    grown = last["memory"] - first["memory"]
    allowed = SLACK + SLOPE * steps * len(steady) / len(samples)
    assert grown <= allowed, f"memory grew by {grown} KB: {[sample['memory'] for sample in samples]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and prints a table; returns 0 if nothing grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.endurance.full", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds an engine may take")
    parser.add_argument("--out", type=Path, help="where the table goes; shown as well")
    options = parser.parse_args(argv)
    head = f"{options.steps} steps, {RANKS} ranks; from a quarter of the steps on."
    lines = [head, "", "| engine | rank | memory, MB | files | threads | |", "|---|---|---|---|---|---|"]
    failed = False
    for engine in options.engines:
        for rank, samples in sorted(measure(engine, options.steps, options.timeout).items()):
            try:
                check(samples, options.steps)
                verdict = "flat"
            except AssertionError as error:
                failed, verdict = True, str(error)
            start, end = samples[WARM_UP], samples[-1]
            spans = [f"{start['memory'] / 1024:.1f} to {end['memory'] / 1024:.1f}"]
            spans += [f"{start[what]} to {end[what]}" for what in ("files", "threads")]
            lines.append(f"| {engine} | {rank} | {' | '.join(spans)} | {verdict} |")
            print(lines[-1], file=sys.stderr)
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
