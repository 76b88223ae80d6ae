"""What `kdist run --restarts` learns of one attempt."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kdist.launchers.hosts.capacity import Placement
from kdist.restarts import progress
from kdist.restarts.attempt import Attempt, End, cause, preemption_of
from kdist.restarts.event_lines import EventLines, Filter
from kdist.restarts.events import Events, read_events


class Watched:
    """What the supervisor learns of one attempt.

    Args:
        signals: sequence of int, the signals that this process has received so far.
        placement: `Placement` or `None`, where the attempt runs, if its size may change.
        host: str, this host, if all ranks run on it, else empty.

    Attributes:
        placement: the same.
        events: `Events`, after the attempt.
        progress: `Progress` or `None`, after the attempt.
    """

    def __init__(self, signals: Sequence[int], placement: Placement | None = None, host: str = "") -> None:
        self._signals = signals
        self.placement = placement
        self._host = host
        self.events = Events({}, False, (), None)
        self.progress: progress.Progress | None = None
        self._lines = EventLines()

    def filtered(self, rest: Filter | None) -> Filter:
        """Returns a filter of the launcher's standard error that passes all but events on.

        Args:
            rest: `Filter` or `None`, the next one.
        """
        self._lines = EventLines(rest)
        return self._lines

    def events_so_far(self, running: str) -> Events:
        """Returns what the ranks have reported until now.

        Args:
            running: str, the job's directory.
        """
        return read_events(running, self._lines.lines)

    def read(self, running: str) -> None:
        """Reads what the ranks have reported.

        Args:
            running: str, the job's directory.
        """
        self.events = self.events_so_far(running)
        self.progress = progress.read(running, self.events)

    def attempt(self, code: int, began: float, output: str | None) -> Attempt:
        """Returns the attempt, which has ended.

        Args:
            code: int, its exit code.
            began: float, in seconds since 1970.
            output: str or `None`, the directory of its ranks' output.
        """
        is_done = code == 0 and preemption_of(self.events) is None  # `Preemption` may exit with any code
        end = End.WELL if is_done else End.STOPPED if self._signals else End.FAILED
        where = () if self.placement is None else self.placement.host_of_rank
        failure = None
        if end is End.FAILED:
            # Ranks on other hosts may not have told where they are.
            failure = cause(self.events, code, self._lines.end(), self._host, where)
        return Attempt(end, code, began, time.time(), self.events, failure, self.progress, output, where)
