"""Whether this process entered a scope, and the files by which `kdist run` learns that of all ranks on its host."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kdist.restarts.events import own_reports

_REPORT = "report"
_CROWDED = "crowded"
_BEGUN, _REACHED = "begun", "reached"
_WAITING, _ALONE, _NEVER, _NEVER_WITH_KERAS = "waiting", "alone", "never", "never-with-keras"


@dataclasses.dataclass
class OwnScopes:
    """The scopes of this process.

    Attributes:
        is_open: bool, whether a scope is open now.
        was_entered: bool, whether one ever was.
        trains_alone: bool, whether this process trains without the other ranks on purpose.
        is_planned: bool, whether `kdist plan` runs the script: every scope is that of one process then.
        settings: mapping of the names of the last scope's arguments to their values.
        directory: `Path` or `None`, where `kdist run` looks for this rank's marks.
        rank: int, this process's number.
    """

    is_open: bool = False
    was_entered: bool = False
    trains_alone: bool = False
    is_planned: bool = False
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    directory: Path | None = None
    rank: int = 0

    def begins(self, directory: Path, rank: int) -> None:
        """Records that this process begins, one of several ranks.

        Args:
            directory: `Path`, where `kdist run` looks for its marks.
            rank: int, its number.
        """
        self.directory, self.rank = directory, rank
        self._mark(_BEGUN)

    @contextlib.contextmanager
    def entered(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Records that a scope is open while the context is.

        Args:
            settings: mapping of the names of its arguments to their values.
        """
        self.is_open = self.was_entered = True
        self.settings = settings
        own_reports.reached_scope()
        self._mark(_REACHED)
        try:
            yield
        finally:
            self.is_open = False

    def waits_for_others(self) -> None:
        """Records that this rank is about to wait in a scope until all others have entered it."""
        self._mark(_WAITING)

    def mark_alone(self) -> None:
        """Records that this process trains without the other ranks on purpose."""
        self.trains_alone = True
        self._mark(_ALONE)

    def script_ended(self, *, used_keras: bool) -> None:
        """Records that the script has ended well, for a rank that entered no scope.

        Args:
            used_keras: bool, whether the script had imported Keras.
        """
        if not self.was_entered and not self.trains_alone:
            self._mark(_NEVER_WITH_KERAS if used_keras else _NEVER)

    @property
    def crowd_is_known(self) -> bool:
        """Whether `kdist run` has said that there are far more ranks than cores."""
        return self.directory is not None and (self.directory / _CROWDED).exists()

    def failed(self, report: str) -> bool:
        """Records the report of a failure, unless another rank's is there; returns whether it is not.

        Args:
            report: str, as printed.
        """
        if self.directory is not None:
            try:
                with (self.directory / _REPORT).open("x", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(report)
            except FileExistsError:
                return False
            except OSError:  # on another host than `kdist run`
                pass
        return True

    def _mark(self, kind: str) -> None:
        if self.directory is not None:
            with contextlib.suppress(OSError):  # on another host than `kdist run`
                (self.directory / f"{kind}.{self.rank}").touch()


own_scopes = OwnScopes()
"""Those of this process."""


@dataclasses.dataclass(frozen=True)
class Marks:
    """The ranks of a job on this host, by what they recorded.

    Attributes:
        waiting: tuple of int, the ranks that entered a scope of several ranks.
        alone: tuple of int, those that train alone on purpose.
        never: tuple of int, those that ended well without a scope.
        trained: bool, whether one of the latter had imported Keras.
        begun: bool, whether any of several ranks runs on this host.
        reached: bool, whether one of these has entered a scope, of whatever kind.
    """

    waiting: tuple[int, ...]
    alone: tuple[int, ...]
    never: tuple[int, ...]
    trained: bool
    begun: bool = False
    reached: bool = False

    def problem(self) -> str:
        """Returns what makes a running job wait for ever, or an empty text."""
        if not self.waiting or not self.never:
            return ""
        return (
            f"rank {_join(self.never)} has ended without kdist.scope(), in which rank {_join(self.waiting)} waits "
            "for it. Expected every rank to enter the scope. Fix: look for an exit or a branch of the script that "
            "only some ranks take, before the scope."
        )

    def remark(self) -> str:
        """Returns what a user must know of a job that has ended well, or an empty text."""
        if self.waiting or self.alone or not self.trained:
            return ""
        return (
            "no rank entered kdist.scope(): each rank ran the whole script by itself. Fix: put the lines that make and "
            "fit the model into `with kdist.scope():`."
        )


class SlowStart:
    """Remarks once on a job of several ranks, some of them on this host, in which none has entered a scope for long.

    Args:
        patience: float, seconds.
    """

    def __init__(self, patience: float = 60.0) -> None:
        self._patience = patience
        self._begin: float | None = time.monotonic()

    def remark(self, marks: Marks) -> str:
        """Returns what a user may want to know, or an empty text.

        Args:
            marks: `Marks`, what the ranks have recorded so far.
        """
        if marks.reached or marks.alone or marks.never:
            self._begin = None
        if not marks.begun or self._begin is None or time.monotonic() - self._begin < self._patience:
            return ""
        self._begin = None
        return (
            f"no rank has reached kdist.scope() for {self._patience:.0f} s: they load TensorFlow, or do what stands "
            "before the scope"
        )


def mark_crowd(directory: str) -> None:
    """Records that the user knows that there are far more ranks than cores.

    Args:
        directory: str, the job's.
    """
    Path(directory, _CROWDED).touch()


def read(directory: str) -> Marks:
    """Returns what the ranks have recorded so far.

    Args:
        directory: str, the job's.
    """
    found: dict[str, list[int]] = {kind: [] for kind in (_BEGUN, _REACHED, _WAITING, _ALONE, _NEVER, _NEVER_WITH_KERAS)}
    try:
        names = os.listdir(directory)
    except OSError:  # removed by what cleans /tmp, or on a disk of the network: the job goes on without it
        names = []
    for name in names:
        kind, _, rank = name.partition(".")
        if kind in found and rank.isdigit():
            found[kind].append(int(rank))
    begun, reached, waiting, alone, without, with_keras = (tuple(sorted(ranks)) for ranks in found.values())
    never = tuple(sorted(without + with_keras))
    return Marks(waiting, alone, never, bool(with_keras), bool(begun), bool(reached))


def read_report(directory: str) -> str:
    """Returns the first report of a failure by a rank of this host, or an empty text.

    Args:
        directory: str, the job's.
    """
    with contextlib.suppress(OSError):
        return Path(directory, _REPORT).read_text(encoding="utf-8", errors="replace")
    return ""


def _join(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
