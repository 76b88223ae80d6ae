"""Whole suites on many jobs: what passed on which job, as a table in Markdown."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.helpers.jobs import Job
from tests.helpers.spmd import Result

CASES_A_LAUNCH = 20  # so that one case that hangs costs one launch's time limit, and no more


class Campaign:
    """Runs checks and keeps what came of them, a row a case and a column a job.

    Args:
        out: path or `None`, where the table goes, after each check: one that is stopped leaves what it has.
        head: str, in Markdown, what stands above the table.

    Attributes:
        errors: list of str, in Markdown, of what failed.
    """

    def __init__(self, out: Path | None = None, head: str = "") -> None:
        self._out, self._head = out, head
        self.errors: list[str] = []
        self._outcomes: dict[tuple[str, str], dict[str, str]] = {}
        self._columns: list[str] = []
        self._processor_time: dict[str, float] = {}
        self._started = time.monotonic()

    def run(
        self,
        part: str,
        column: str,
        on: Job,
        target: str,
        names: Sequence[str],
        *,
        timeout: float,
        given: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Runs some of a target's cases on a job.

        Args:
            part: str, the first cell of their rows; the second is a case's name.
            column: str, what the job is called.
            on: `Job`.
            target: str, as for `spmd.run`.
            names: sequence of str, the cases; a text that one returns on rank 0 stands beside "passed".
            timeout: float, seconds that a launch may take.
            given: str or `None`, as for `spmd.run`.
            env: mapping, environment variables on top.
        """
        for start in range(0, len(names), CASES_A_LAUNCH):
            some = names[start : start + CASES_A_LAUNCH]
            with ends_at_sigterm():
                result = on.run(target, only=some, timeout=timeout, given=given, env=env)
            for name in some:
                self._processor_time[f"{part}: {name} on {column}"] = result.processor_time(name)
                self.attempt(part, name, column, functools.partial(_value, result, name))
        print(f"{part} on {column}: done after {time.monotonic() - self._started:.0f} s", file=sys.stderr)

    def slowest(self, count: int = 10) -> str:
        """Returns the cases that took the most processor time, a line each."""
        most = sorted(self._processor_time.items(), key=lambda item: -item[1])[:count]
        return "\n".join(f"{seconds:6.1f} s of processor time: {name}" for name, seconds in most)

    def attempt(self, part: str, name: str, column: str, check: Callable[[], object]) -> None:
        """Notes whether a check passes, and if not, why; a text that it returns stands beside "passed"."""
        try:
            said = check()
        except Exception as error:
            outcome = "failed"
            why = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
            self.errors.append(f"## {part}: {name} on {column}\n\n```\n{why[-4000:]}\n```")
        else:
            outcome = f"passed, {said}" if isinstance(said, str) else "passed"
        if column not in self._columns:
            self._columns.append(column)
        self._outcomes.setdefault((part, name), {})[column] = outcome
        if self._out:
            self._out.write_text(self.text())

    def text(self) -> str:
        """Returns the sums, the table, and what failed."""
        cells = [outcome for by_column in self._outcomes.values() for outcome in by_column.values()]
        head = ["part", "case", *self._columns]
        failed = cells.count("failed")
        lines = [
            *([self._head, ""] if self._head else []),
            f"{len(cells) - failed} passed, {failed} failed",
            "",
            _row(head),
            _row(["---"] * len(head)),
            *(_row([*key, *(found.get(each, "") for each in self._columns)]) for key, found in self._outcomes.items()),
            "",
        ]
        return "\n".join([*lines, *self.errors]) + "\n"


def _value(result: Result, name: str) -> object:
    return result.values(name)[0]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


@contextlib.contextmanager
def ends_at_sigterm() -> Iterator[None]:
    """A context in which SIGTERM raises `SystemExit`, so that no launcher is left behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
