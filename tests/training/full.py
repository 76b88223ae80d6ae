"""The whole fidelity suite, `python -m tests.training.full --ranks 2 3 4 --out FILE`: a table in Markdown."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.helpers import spmd

TARGETS = {
    "features": "tests.training.features:FEATURES",
    "matrix": "tests.training.fidelity:MATRIX",
    "behaviours": "tests.training.behaviours_order:CASES",
}
CASES_A_LAUNCH = 20  # so that one case that hangs costs one launch's time limit, and no more


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every case on every number of ranks; returns 0 if all passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.training.full", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], metavar="N")
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS), help="parts of the suite")
    parser.add_argument("--out", type=Path, help="where the table goes; shown as well")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a launch may take")
    options = parser.parse_args(argv)
    results: dict[tuple[str, str], dict[int, str]] = {}
    errors = []
    started = time.monotonic()
    for part in options.only:
        for ranks in options.ranks:
            for name, complaint in _run(TARGETS[part], ranks, options.timeout).items():
                results.setdefault((part, name), {})[ranks] = "failed" if complaint else "passed"
                if complaint:
                    errors.append(f"## {part}: {name} on {ranks} ranks\n\n```\n{complaint[-4000:]}\n```")
            print(f"{part} on {ranks} ranks: done after {time.monotonic() - started:.0f} s", file=sys.stderr)
    text = "\n".join([_table(results, options.ranks), *errors]) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)
    return 1 if errors else 0


def _run(target: str, ranks: int, timeout: float) -> dict[str, str | None]:
    """Returns each case's complaint, `None` where it passed."""
    names, complaints = spmd.names(target), {}
    for start in range(0, len(names), CASES_A_LAUNCH):
        some = names[start : start + CASES_A_LAUNCH]
        result = spmd.run(target, ranks, only=some, timeout=timeout)
        for name in some:
            complaints[name] = _complaint(result, name)
    return complaints


def _complaint(result: spmd.Result, name: str) -> str | None:
    try:
        result.check(name)
    except AssertionError as error:
        return str(error)
    return None


def _table(results: dict[tuple[str, str], dict[int, str]], ranks: Sequence[int]) -> str:
    """Returns Markdown: a row a case, a column a number of ranks, and the sums."""
    cells = [outcome for by_ranks in results.values() for outcome in by_ranks.values()]
    head = ["part", "case", *(f"{n} ranks" for n in ranks)]
    lines = [
        f"{cells.count('passed')} passed, {cells.count('failed')} failed",
        "",
        _row(head),
        _row(["---"] * len(head)),
    ]
    lines += [_row([*key, *(by_ranks.get(n, "") for n in ranks)]) for key, by_ranks in results.items()]
    return "\n".join([*lines, ""])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
