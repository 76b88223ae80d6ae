"""Every kind of fault, at every moment, over every engine: `python -m tests.faults.full --out FILE`.

A job of two ranks a cell; a table in Markdown of what each ended with and after how many seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults.cells import KINDS, MOMENTS, all_cells, covering_cells
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
    cells = (covering_cells if options.covering else all_cells)(options.engines)
    rows, errors = [], []
    started = time.monotonic()
    for cell in (each for each in cells if each.kind in options.kinds and each.moment in options.moments):
        ended = cell.run()
        outcome = "passed"
        try:
            cell.check(ended)
        except AssertionError as error:
            outcome = "failed"
            errors.append(f"## {cell}\n\n```\n{str(error)[-4000:]}\n```")
        rows.append(
            f"| {cell.engine} | {cell.kind} | {cell.moment} | {cell.rank} | {ended.returncode} "
            f"| {ended.seconds:.0f} | {outcome} |"
        )
        print(f"{time.monotonic() - started:.0f} s: {rows[-1]}", file=sys.stderr)
        if options.out:
            options.out.write_text(table(rows, errors))
    print(table(rows, errors))
    return 1 if errors else 0


def table(rows: Sequence[str], errors: Sequence[str]) -> str:
    """Returns the sums, the table, and what failed."""
    head = [
        "| engine | fault | moment | rank | exit code | seconds, start included | |",
        "|---|---|---|---|---|---|---|",
    ]
    passed = f"{len(rows) - len(errors)} passed, {len(errors)} failed"
    return "\n".join([passed, "", *head, *rows, "", *errors]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
