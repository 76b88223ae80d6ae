"""`kdist run --restarts N`: the attempts of a job, what is said of them, and the summary."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kdist.cli.jobs import left_copies
from kdist.cli.jobs.elastic import Elastic, PlacementPlanner
from kdist.cli.jobs.message import tell
from kdist.cli.jobs.started_job import JobToStart, StartedJob, started
from kdist.cli.jobs.watched import Watched
from kdist.errors import LaunchError
from kdist.launchers.hosts.capacity import Placement
from kdist.launchers.process import received_notices, received_signals
from kdist.restarts import summary
from kdist.restarts.attempt import Attempt, End
from kdist.restarts.rules import ASKED_TO_END
from kdist.restarts.supervisor import supervise

SUMMARY = "restarts.json"  # in the directory of the output

_Attempted = tuple[StartedJob, Watched]


def run(
    job: JobToStart, restarts: int, output: str | None, elastic: Elastic | None = None, *, standby: bool = False
) -> int:
    """Runs a job, again where that helps.

    Args:
        job: `JobToStart`.
        restarts: int, how many restarts are allowed without a new checkpoint between them.
        output: str or `None`, the directory in which each attempt gets one of its own.
        elastic: `Elastic` or `None`, the sizes that the job may have, if there are several.
        standby: bool, whether the next attempt waits, with Keras imported, while one runs.

    Returns:
        The exit code of the last attempt.

    Raises:
        LaunchError: if there is no first attempt.
    """
    with received_signals() as signals, received_notices() as notices, contextlib.ExitStack() as stack:
        ends: list[End] = []
        stack.callback(lambda: left_copies.delete(job.name) if ends[-1:] == [End.WELL] else left_copies.write(job.name))
        starts = _Starts(job, output, elastic, signals, notices, standby=standby)
        stack.callback(starts.close)
        attempts, why = supervise(
            starts.make_attempt,
            restarts,
            say=tell,
            keep=functools.partial(_keep, restarts, output),
            is_stopped=lambda: bool(signals or notices),
        )
        ends = [attempt.end for attempt in attempts]
    asked = [*signals, *notices]
    if not attempts and not asked:
        raise LaunchError(
            f"The job cannot be started. Received: {why}. Expected enough hosts to answer without a password. Fix: "
            "start them, lower --min-np, or raise --wait."
        )
    if not attempts:
        return 128 + asked[0]
    if said := summary.in_words(attempts, why):
        tell(said)
    if output is not None:
        tell(f"the summary of all attempts is in {os.path.join(output, SUMMARY)}")
    last = attempts[-1]
    if signals and last.end is End.FAILED:  # between two attempts
        return 128 + signals[0]
    if why == ASKED_TO_END and last.end is End.FAILED and not last.is_preempted:
        return os.EX_TEMPFAIL  # so that a scheduler starts again what this one would have
    return last.code


class _Starts:
    """Makes the attempts of a job; with standby, it starts each while the one before it runs.

    Args:
        job: `JobToStart`.
        output: str or `None`, the directory in which each attempt gets one of its own.
        elastic: `Elastic` or `None`, the sizes that the job may have, if there are several.
        signals: sequence of int, the signals that this process has received so far.
        notices: sequence of int, the same for those that ask the ranks to leave.
        standby: bool.
    """

    def __init__(
        self,
        job: JobToStart,
        output: str | None,
        elastic: Elastic | None,
        signals: Sequence[int],
        notices: Sequence[int],
        *,
        standby: bool,
    ) -> None:
        self._job = job
        self._output = output
        self._planner = None if elastic is None else PlacementPlanner(elastic, lambda: bool(signals or notices))
        self._signals = signals
        self._notices = notices
        self._standby = standby
        self._waiting: _Attempted | None = None
        self._waiting_stack = contextlib.ExitStack()

    def make_attempt(self, attempts: Sequence[Attempt]) -> Attempt | str:
        """Makes the next attempt, and returns it when no process of it is left, or returns why it cannot be made.

        Args:
            attempts: sequence of `Attempt`, all so far.
        """
        placement = None if self._planner is None else self._planner.next(attempts)
        if isinstance(placement, str):
            return placement
        try:
            made = self._made(len(attempts) + 1, placement)
        except LaunchError as error:
            if not attempts:
                raise
            return str(error)  # the summary of those before is of use
        return made if self._planner is None else self._planner.explained(attempts, made)

    def _made(self, number: int, placement: Placement | None) -> Attempt:
        began = time.time()
        with contextlib.ExitStack() as stack:
            job, watched = self._taken(stack, placement) or stack.enter_context(self._started(number, placement))
            growth = None if self._planner is None else self._planner.growth

            def meanwhile(running: str) -> None:
                if growth is not None:
                    growth.look(running, lambda: watched.events_so_far(running))
                # Not before the ranks of this one train: their own start would be slower beside another.
                if self._standby and self._waiting is None and watched.events_so_far(running).made_step:
                    self._prepare(number + 1, placement)

            try:
                code = job.follow(self._signals, self._notices, meanwhile)
            finally:
                if growth is not None:
                    growth.close(job.running)
            return watched.attempt(code, began, self._output_of(number))

    def _prepare(self, number: int, placement: Placement | None) -> None:
        """Starts the next job, which waits; the one that runs goes on if that fails."""
        try:
            waiting = self._waiting_stack.enter_context(self._started(number, placement, standby=True))
        except (LaunchError, OSError) as error:
            self._standby = False
            tell(f"no other attempt will be on standby: {error}")
        else:
            self._waiting = waiting

    def close(self) -> None:
        """Ends the job that waits."""
        self._waiting = None
        self._waiting_stack.close()

    def _taken(self, stack: contextlib.ExitStack, placement: Placement | None) -> _Attempted | None:
        """Returns the job that waits, if its launcher lives and it is where it should be; the stack ends it."""
        waiting, self._waiting = self._waiting, None
        waiting_stack = self._waiting_stack.pop_all()
        if waiting is None or waiting[1].placement != placement or not waiting[0].is_running:
            waiting_stack.close()
            return None
        stack.enter_context(waiting_stack)
        return waiting

    @contextlib.contextmanager
    def _started(self, number: int, placement: Placement | None, *, standby: bool = False) -> Iterator[_Attempted]:
        watched = Watched(self._signals, placement, "" if self._job.is_on_several_hosts else platform.node())
        with started(self._job, self._output_of(number), watched, standby=standby) as job:
            yield job, watched

    def _output_of(self, number: int) -> str | None:
        return None if self._output is None else os.path.join(self._output, f"attempt{number}")


def _keep(restarts: int, output: str | None, attempts: Sequence[Attempt], why: str) -> None:
    if output is not None and attempts:
        text = json.dumps(summary.as_values(attempts, why, restarts), indent=2)
        try:
            new = Path(output, f"{SUMMARY}.new")
            new.write_text(f"{text}\n", encoding="utf-8")
            new.replace(Path(output, SUMMARY))
        except OSError as error:
            tell(f"the summary of the attempts cannot be written: {error}")
