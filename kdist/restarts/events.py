"""What ranks and launchers report of an attempt, beside the sentences that the user reads: its events, in their order.

A rank on the host of `kdist run` appends to a file in the job's directory. One on another host, or without room there,
writes a line to its standard error, which `kdist run` takes out of what it shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import json
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LINE_PREFIX = "[kdist-event] "
"""The beginning of a line of standard error that is an event."""

_FILE = "events.jsonl"  # in the job's directory
_PLACE = "place"  # of a rank, in the job's directory
_MAX_TEXT = 1000  # characters of a message: a line must be written at once


class Kind(enum.Enum):
    """The kinds of failures, by what follows from them."""

    EXCEPTION = "exception"  # of the user's script or of kdist
    EXIT = "exit"  # a code that the script chose
    DISAGREEMENT = "disagreement"  # ranks make different calls
    STALL = "stall"  # a rank makes no progress, or sends no heartbeat
    LOST = "lost"  # a rank or its host is gone; nobody knows how
    SIGNAL = "signal"  # a rank was killed
    PREEMPTION = "preemption"  # all ranks have saved and left, as a signal asked them to
    RESIZE = "resize"  # the same for a larger job, as `kdist run` asked them to


@dataclasses.dataclass(frozen=True)
class Failure:
    """A failure of an attempt.

    Attributes:
        kind: `Kind`.
        text: str, in words.
        rank: int or `None`, the rank to blame.
        host: str, its host, where it is known.
        is_consequence: bool, whether another rank's end is the cause.
        comes_again: bool, whether another attempt is known to fail the same way.
        from_launcher: bool, whether a launcher reports it, not a rank.
    """

    kind: Kind
    text: str
    rank: int | None = None
    host: str = ""
    is_consequence: bool = False
    comes_again: bool = False
    from_launcher: bool = False


@dataclasses.dataclass(frozen=True)
class Healing:
    """A loss of ranks after which the others went on in their processes.

    Attributes:
        lost: tuple of int, the ranks that were lost, as they were numbered until then.
        lost_first: tuple of int, all that were lost so far, as the launcher numbers them.
        ranks: int, how many went on.
        host: str, where the lost ones were.
        began: float, when the others knew, in seconds since 1970.
        steps_lost: int or `None`, the steps since the last checkpoint; `None` without a backup.
        saved: float, when that was written, in seconds since 1970; 0 for never.
        went_on: float, when the next step had ended, in seconds since 1970; 0 for never.
    """

    lost: tuple[int, ...]
    lost_first: tuple[int, ...]
    ranks: int
    host: str
    began: float
    steps_lost: int | None
    saved: float
    went_on: float = 0.0

    @property
    def text(self) -> str:
        """What happened, in words."""
        lost = f"rank {self.lost[0]}" if len(self.lost) == 1 else f"ranks {', '.join(map(str, self.lost))}"
        were = "was" if len(self.lost) == 1 else "were"
        return f"{lost} on host {self.host} {were} killed, and {self.ranks} ranks went on"


@dataclasses.dataclass
class OwnReports:
    """What this process reports; nothing, unless it is a rank of `kdist run --restarts`.

    Attributes:
        directory: `Path` or `None`, the job's, which exists on the host of `kdist run`.
        running: `Path` or `None`, the same for a rank of any `kdist run`, which may ask it to leave.
        rank: int, this process's number.
        job: str, which is the same in all attempts of the job, and in no other job; empty without a supervisor.
        is_resized: bool, whether the next attempt may have another number of ranks.
    """

    directory: Path | None = None
    running: Path | None = None
    rank: int = 0
    job: str = ""
    is_resized: bool = False
    _place: str = ""
    _has_made_step: bool = False

    def record_place(self, place: str) -> None:
        """Records where this rank is, for a `kdist run` of its host, which may find it killed.

        Args:
            place: str, a method and a line of the script; empty if unknown.
        """
        if self.running is None or place in ("", self._place):
            return
        self._place = place
        with contextlib.suppress(OSError):
            (self.running / f"{_PLACE}.{self.rank}").write_text(place, encoding="utf-8", errors="surrogateescape")

    def reached_scope(self) -> None:
        """Reports that this rank has entered a scope."""
        self._send({"event": "scope", "rank": self.rank, "host": platform.node()})

    def made_step(self) -> None:
        """Reports that this rank has trained a first step, once."""
        if self.rank == 0 and self.directory is not None and not self._has_made_step:
            self._has_made_step = True
            self._send({"event": "step", "time": time.time()})

    def script_ended(self) -> None:
        """Reports that the script of this rank has ended well."""
        if self.rank == 0:
            self._send({"event": "ended"})

    def can_leave(self) -> None:
        """Reports that all ranks save and leave if they are asked to, by `kdist.restarts.request`."""
        self._send({"event": "can leave"})

    def progress(self, numbers: Iterable[float]) -> None:
        """Reports the progress of a chief whose file `kdist run` cannot read.

        Args:
            numbers: iterable of float, the fields of `kdist.restarts.progress.Progress`.
        """
        self._send({"event": "progress", "numbers": list(numbers)})

    def healed(self, healing: Healing) -> None:
        """Reports that ranks were lost, and this one goes on with the others.

        Args:
            healing: `Healing`.
        """
        self._has_made_step = False  # the script runs again
        self._send({"event": "healing", **dataclasses.asdict(healing)})

    def failed(self, kind: Kind, text: str, rank: int | None, **more: bool) -> None:
        """Reports a failure.

        Args:
            kind: `Kind`.
            text: str, in words.
            rank: int or `None`, the rank to blame, if one is.
            **more: other attributes of `Failure`.
        """
        host = platform.node() if rank == self.rank else ""
        self._send(_encoded(Failure(kind, text, rank, host, **more)))

    def _send(self, event: dict[str, Any]) -> None:
        if self.directory is None:
            return
        with contextlib.suppress(OSError):
            if self.directory.is_dir():
                _append(self.directory, event)
                return
        with contextlib.suppress(OSError):  # on another host, or there is no room
            os.write(2, f"{LINE_PREFIX}{json.dumps(event)}\n".encode())


own_reports = OwnReports()
"""Those of this process."""


def append_failure(directory: str, failure: Failure) -> None:
    """Adds a failure to the events of a job of which this process is no rank.

    Args:
        directory: str, the job's.
        failure: `Failure`.
    """
    with contextlib.suppress(OSError):
        _append(Path(directory), _encoded(failure))


@dataclasses.dataclass(frozen=True)
class Events:
    """What was reported of an attempt.

    Attributes:
        hosts: dict of int to str, the ranks that entered a scope, with their hosts.
        made_step: bool, whether a step was trained.
        failures: tuple of `Failure`, in their order.
        progress: tuple of float or `None`, the last progress that came by standard error.
        can_leave: bool, whether all ranks save and leave if they are asked to.
        healings: tuple of `Healing`, in their order.
        has_ended: bool, whether rank 0's script has ended well.
    """

    hosts: dict[int, str]
    made_step: bool
    failures: tuple[Failure, ...]
    progress: tuple[float, ...] | None
    can_leave: bool = False
    healings: tuple[Healing, ...] = ()
    has_ended: bool = False


def read_events(directory: str, lines: Iterable[str] = ()) -> Events:
    """Returns the events of an attempt.

    Args:
        directory: str, the job's.
        lines: iterable of str, events that came by standard error.
    """
    own: list[str] = []
    with contextlib.suppress(OSError):  # there is none, or it is on a disk of the network
        own = Path(directory, _FILE).read_text().splitlines()
    texts = [*own, *lines]
    hosts: dict[int, str] = {}
    failures, progress, made_step, can_leave, has_ended = [], None, False, False, False
    healings: list[Healing] = []
    for text in texts:
        with contextlib.suppress(ValueError, LookupError, TypeError):  # half a line of a rank that was killed
            event = json.loads(text)
            kind = event.pop("event")
            if kind == "scope":
                hosts[int(event["rank"])] = event["host"]
            elif kind == "step":
                made_step = True
                if healings and not healings[-1].went_on:
                    healings[-1] = dataclasses.replace(healings[-1], went_on=event["time"])
            elif kind == "healing":
                ranks = {name: tuple(event[name]) for name in ("lost", "lost_first")}
                healings.append(Healing(**{**event, **ranks}))
            elif kind == "can leave":
                can_leave = True
            elif kind == "ended":
                has_ended = True
            elif kind == "progress":
                progress = tuple(event["numbers"])
            else:
                failures.append(Failure(**{**event, "kind": Kind(event["kind"])}))
    return Events(hosts, made_step, tuple(failures), progress, can_leave, tuple(healings), has_ended)


def read_place(directory: str, rank: int) -> str:
    """Returns where a rank of this host was last seen; empty if unknown.

    Args:
        directory: str, the job's.
        rank: int, its number.
    """
    with contextlib.suppress(OSError):
        return Path(directory, f"{_PLACE}.{rank}").read_text(encoding="utf-8", errors="replace")
    return ""


def _encoded(failure: Failure) -> dict[str, Any]:
    values = {**dataclasses.asdict(failure), "kind": failure.kind.value, "text": failure.text[:_MAX_TEXT]}
    return {"event": "failure", **values}


def _append(directory: Path, event: dict[str, Any]) -> None:
    line = f"\n{json.dumps(event)}\n".encode()  # half a line may be there, for which there was no room
    descriptor = os.open(directory / _FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)
