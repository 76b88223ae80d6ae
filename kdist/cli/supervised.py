"""`kdist run --restarts N`: the attempts of a job, what is said of them, and the summary."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kdist.cli.message import tell
from kdist.cli.started_job import JobToStart, StartedJob, started
from kdist.cli.watched import Watched
from kdist.launchers.process import received_signals
from kdist.restarts import report, summary
from kdist.restarts.attempt import Attempt, End
from kdist.restarts.supervisor import supervise

SUMMARY = "restarts.json"  # in the directory of the output

_Attempted = tuple[StartedJob, Watched]


def run(job: JobToStart, restarts: int, output: str | None, *, standby: bool = False) -> int:
    """Runs a job, again where that helps.

    Args:
        job: `JobToStart`.
        restarts: int, how many restarts are allowed without a new checkpoint between them.
        output: str or `None`, the directory in which each attempt gets one of its own.
        standby: bool, whether the next attempt waits, with Keras imported, while one runs.

    Returns:
        The exit code of the last attempt.
    """
    with received_signals() as signals, contextlib.ExitStack() as stack:
        starts = _Starts(job, output, signals, standby=standby)
        stack.callback(starts.close)
        attempts, why = supervise(
            starts.make_attempt,
            restarts,
            say=tell,
            keep=functools.partial(_keep, restarts, output),
            is_stopped=lambda: bool(signals),
        )
    if said := summary.in_words(attempts, why):
        tell(said)
    if output is not None:
        tell(f"the summary of all attempts is in {os.path.join(output, SUMMARY)}")
    if signals and attempts[-1].end is not End.STOPPED:  # between two attempts
        return 128 + signals[0]
    return attempts[-1].code


class _Starts:
    """Makes the attempts of a job; with standby, it starts each while the one before it runs.

    Args:
        job: `JobToStart`.
        output: str or `None`, the directory in which each attempt gets one of its own.
        signals: sequence of int, the signals that this process has received so far.
        standby: bool.
    """

    def __init__(self, job: JobToStart, output: str | None, signals: Sequence[int], *, standby: bool) -> None:
        self._job = job
        self._output = output
        self._signals = signals
        self._standby = standby
        self._waiting: _Attempted | None = None
        self._waiting_stack = contextlib.ExitStack()

    def make_attempt(self, number: int) -> Attempt:
        """Makes an attempt, and returns when no process of it is left.

        Args:
            number: int, from 1.
        """
        began = time.time()
        with contextlib.ExitStack() as stack:
            job, watched = self._taken(stack) or stack.enter_context(self._started(number))
            meanwhile = functools.partial(self._prepare, number + 1) if self._standby else None
            code = job.follow(self._signals, meanwhile)
            return watched.attempt(code, began, self._output_of(number))

    def close(self) -> None:
        """Ends the job that waits."""
        self._waiting = None
        self._waiting_stack.close()

    def _taken(self, stack: contextlib.ExitStack) -> _Attempted | None:
        """Returns the job that waits, if its launcher lives; the stack ends it."""
        waiting, self._waiting = self._waiting, None
        stack.enter_context(self._waiting_stack.pop_all())
        return waiting if waiting is not None and waiting[0].is_running else None

    def _prepare(self, number: int, running: str) -> None:
        """Starts the next job once the ranks of this one train: their own start would be slower beside it."""
        if self._waiting is None and report.read(running).made_step:
            self._waiting = self._waiting_stack.enter_context(self._started(number, standby=True))

    @contextlib.contextmanager
    def _started(self, number: int, *, standby: bool = False) -> Iterator[_Attempted]:
        watched = Watched(self._signals)
        with started(self._job, self._output_of(number), watched, standby=standby) as job:
            yield job, watched

    def _output_of(self, number: int) -> str | None:
        return None if self._output is None else os.path.join(self._output, f"attempt{number}")


def _keep(restarts: int, output: str | None, attempts: Sequence[Attempt], why: str) -> None:
    if output is not None:
        text = json.dumps(summary.as_values(attempts, why, restarts), indent=2)
        try:
            Path(output, SUMMARY).write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            tell(f"the summary of the attempts cannot be written: {error}")
