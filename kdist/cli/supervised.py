"""`kdist run --restarts N`: the attempts of a job, what is said of them, and the summary."""

from __future__ import annotations

import functools
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kdist.cli.elastic import Elastic, Growth, Sizes
from kdist.cli.message import tell
from kdist.errors import LaunchError
from kdist.launchers.capacity import Placement
from kdist.launchers.process import received_signals
from kdist.restarts import progress, report, summary
from kdist.restarts.attempt import Attempt, End, cause
from kdist.restarts.event_lines import EventLines, Filter
from kdist.restarts.supervisor import supervise

SUMMARY = "restarts.json"  # in the directory of the output


class Watched:
    """What the supervisor learns of one attempt.

    Args:
        signals: list of int, the signals that this process has received so far.
        placement: `Placement` or `None`, where the attempt runs, if its size may change.
        growth: `Growth` or `None`, what looks whether it could be larger.

    Attributes:
        signals: the same.
        placement: the same.
        events: `Events`, after the attempt.
        progress: `Progress` or `None`, after the attempt.
    """

    def __init__(self, signals: list[int], placement: Placement | None = None, growth: Growth | None = None) -> None:
        self.signals = signals
        self.placement = placement
        self._growth = growth
        self.events = report.Events({}, False, (), None)
        self.progress: progress.Progress | None = None
        self._lines = EventLines()

    def filtered(self, rest: Filter | None) -> Filter:
        """Returns a filter of the launcher's standard error that passes all but events on.

        Args:
            rest: `Filter` or `None`, the next one.
        """
        self._lines = EventLines(rest)
        return self._lines

    def look(self, running: str) -> None:
        """Looks whether the attempt, which runs, could be larger.

        Args:
            running: str, the job's directory.
        """
        if self._growth is not None:
            self._growth.look(running, lambda: report.read(running, self._lines.lines))

    def read(self, running: str) -> None:
        """Reads what the ranks have reported.

        Args:
            running: str, the job's directory.
        """
        if self._growth is not None:
            self._growth.close(running)
        self.events = report.read(running, self._lines.lines)
        self.progress = progress.read(running, self.events)

    def attempt(self, code: int, began: float, output: str | None) -> Attempt:
        """Returns the attempt, which has ended.

        Args:
            code: int, its exit code.
            began: float, in seconds since 1970.
            output: str or `None`, the directory of its ranks' output.
        """
        end = End.STOPPED if self.signals else End.WELL if code == 0 else End.FAILED
        hosts = {platform.node(), *self.events.hosts.values()}
        failure = None
        if end is End.FAILED:
            failure = cause(self.events, code, self._lines.end(), platform.node() if len(hosts) == 1 else "")
        where = () if self.placement is None else self.placement.host_of_rank
        return Attempt(end, code, began, time.time(), self.events, failure, self.progress, output, where)


def run(
    run_job: Callable[[str | None, Watched], int], restarts: int, output: str | None, elastic: Elastic | None = None
) -> int:
    """Runs a job, again where that helps.

    Args:
        run_job: function of the output's directory and of a `Watched` that makes an attempt and returns its code.
        restarts: int, how many restarts are allowed without a new checkpoint between them.
        output: str or `None`, the directory in which each attempt gets one of its own.
        elastic: `Elastic` or `None`, the sizes that the job may have, if there are several.

    Returns:
        The exit code of the last attempt.

    Raises:
        LaunchError: if there is no first attempt.
    """
    with received_signals() as signals:
        sizes = None if elastic is None else Sizes(elastic, lambda: bool(signals))

        def start(attempts: Sequence[Attempt]) -> Attempt | str:
            watched = Watched(signals)
            if sizes is not None:
                placement = sizes.next(attempts)
                if isinstance(placement, str):
                    return placement
                watched = Watched(signals, placement, sizes.growth)
            began = time.time()
            directory = None if output is None else os.path.join(output, f"attempt{len(attempts) + 1}")
            try:
                code = run_job(directory, watched)
            except LaunchError as error:
                if not attempts:
                    raise
                return str(error)  # the summary of those before is of use
            made = watched.attempt(code, began, directory)
            return made if sizes is None else sizes.explained(attempts, made)

        attempts, why = supervise(
            start,
            restarts,
            say=tell,
            keep=functools.partial(_keep, restarts, output),
            is_stopped=lambda: bool(signals),
        )
    if not attempts and not signals:
        raise LaunchError(
            f"The job cannot be started. Received: {why}. Expected enough hosts to answer without a password. Fix: "
            "start them, lower --min-np, or raise --wait."
        )
    if not attempts:
        return 128 + signals[0]
    if said := summary.in_words(attempts, why):
        tell(said)
    if output is not None:
        tell(f"the summary of all attempts is in {os.path.join(output, SUMMARY)}")
    if signals and attempts[-1].end is not End.STOPPED:  # between two attempts
        return 128 + signals[0]
    return attempts[-1].code


def _keep(restarts: int, output: str | None, attempts: Sequence[Attempt], why: str) -> None:
    if output is not None and attempts:
        text = json.dumps(summary.as_values(attempts, why, restarts), indent=2)
        try:
            Path(output, SUMMARY).write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            tell(f"the summary of the attempts cannot be written: {error}")
