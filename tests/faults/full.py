"""Every kind of fault, at every moment, over every engine: `python -m tests.faults.full --out FILE`.

A job of two ranks a cell; a table in Markdown of what each ended with and after how many seconds.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.faults.cells import KINDS, MOMENTS, Cell, all_cells, covering_cells
from tests.helpers.campaign import Campaign
from tests.helpers.jobs import ENGINES


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the campaign; returns 0 if all passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.full", description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="how the ranks talk")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=list(MOMENTS))
    parser.add_argument("--covering", action="store_true", help="only cells in which every two values meet")
    parser.add_argument("--out", type=Path, help="where the table goes, after each cell; shown as well")
    options = parser.parse_args(argv)
    campaign = Campaign(options.out)
    for cell in (covering_cells if options.covering else all_cells)(options.engines):
        if cell.kind in options.kinds and cell.moment in options.moments:
            campaign.attempt(
                cell.kind, f"{cell.moment}, rank {cell.rank}", cell.engine, functools.partial(broken, cell)
            )
    print(campaign.text())
    return 1 if campaign.errors else 0


def broken(cell: Cell) -> str:
    """Breaks a job and asserts what must come of it; returns what it ended with, its start included in the seconds."""
    ended = cell.run()
    print(f"{cell}: exit code {ended.returncode} after {ended.seconds:.0f} s", file=sys.stderr)
    cell.check(ended)
    return f"exit code {ended.returncode} after {ended.seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
