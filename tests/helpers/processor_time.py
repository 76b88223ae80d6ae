"""Tells at the end of a run which files cost the most processor time, that of the processes they start included."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

SHOWN = 25
NAME = "processor time"


class ProcessorTime:
    """A plugin of pytest: each report carries the seconds since the report before it, and the run ends with their sums.

    Time is that of the test's process and of all processes that it has waited for, so that waiting costs nothing, and a
    busy machine changes little. Files of which all tests together took less than a second are left out.
    """

    def __init__(self) -> None:
        self._before = _used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Adds to a report what was used for it: setup, call or teardown of one test."""
        report: Any = yield
        now = _used()
        report.user_properties.append((NAME, now - self._before))
        self._before = now
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Writes the table."""
        reports = [report for reports in terminalreporter.stats.values() for report in reports]
        lines = table(each for report in reports if isinstance(report, pytest.TestReport) for each in costs(report))
        if lines:
            terminalreporter.section("processor time, seconds by file")
            terminalreporter.write_line("\n".join(lines))


def costs(report: pytest.TestReport) -> Iterator[tuple[str, float]]:
    """Yields the file of a report, and what it cost."""
    for name, value in report.user_properties:
        if name == NAME:
            yield report.nodeid.partition("::")[0], float(str(value))


def table(costs: Iterable[tuple[str, float]]) -> list[str]:
    """Returns one line a file, the most expensive ones first, and one for all."""
    seconds: dict[str, float] = {}
    for file, cost in costs:
        seconds[file] = seconds.get(file, 0.0) + cost
    shown = sorted((file for file in seconds if seconds[file] >= 1), key=lambda file: -seconds[file])[:SHOWN]
    return [f"{seconds[file]:7.0f}  {file}" for file in shown] + [f"{sum(seconds.values()):7.0f}  all"] * bool(shown)


def _used() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
