"""The whole fidelity suite, `python -m tests.training.full --ranks 2 3 4 --out FILE`: a table in Markdown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.helpers import spmd
from tests.helpers.campaign import Campaign
from tests.helpers.jobs import ENGINES, MORE, job
from tests.training.covering import COVERING

TARGETS = {
    "features": "tests.training.features:FEATURES",
    "matrix": "tests.training.fidelity:MATRIX",
    "random": "tests.training.random_programs:RANDOM,tests.training.random_losses:RANDOM_LOSSES,"
    "tests.training.random_steps:RANDOM_STEPS",
    "sharded": "tests.training.sharded:SHARDED",
    "tables": "tests.training.tables:CASES",
    "tuner": "tests.tuner_cases",
    "behaviours": ",".join(
        f"tests.training.behaviours_{module}:CASES"
        for module in ("refusals", "callbacks", "scaling", "randomness", "order", "loops")
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every case on every number of ranks; returns 0 if all passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.training.full", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], metavar="N")
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES, *MORE], default=["mpi"], help="how the ranks talk")
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS), help="parts of the suite")
    parser.add_argument("--covering", action="store_true", help="instead, the cases that other versions run, too")
    parser.add_argument("--out", type=Path, help="where the table goes; shown as well")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a launch may take")
    parser.add_argument("--slowest", type=int, default=10, metavar="K", help="name the K slowest cases")
    options = parser.parse_args(argv)
    jobs = {f"{engine}, {ranks} ranks": job(engine, ranks) for engine in options.engines for ranks in options.ranks}
    campaign = Campaign(options.out)
    parts = {part: (TARGETS[part], spmd.names(TARGETS[part])) for part in options.only}
    if options.covering:
        parts = {"covering": ("tests.training.all_cases:CASES", list(COVERING))}
    for part, (target, names) in parts.items():
        for column, on in jobs.items():
            campaign.run(part, column, on, target, names, timeout=options.timeout)
    print(campaign.text())
    print(campaign.slowest(options.slowest), file=sys.stderr)
    return 1 if campaign.errors else 0


if __name__ == "__main__":
    sys.exit(main())
