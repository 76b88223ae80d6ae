"""What `kdist run` knows of a job's failure, from what ranks and launchers say, and the summary of it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from kdist.restarts.events import Failure, Kind, read_place
from kdist.restarts.launcher_words import failure_in

LABEL = rb"(?:\[\d+,?\d*\]<std(?:err|out)>: ?)?(?:\[rank \d+ [\d:]+\] )?"
"""What horovodrun and `--tee` put before a line, as a regular expression."""

_REPORT = re.compile(
    LABEL + rb"\[kdist\] (rank \d+ of \d+ on host \S+) (raised [\w.]+|(?:exited with code \d+|ends the job)(?:: .*)?)"
)
_ENDS = "ends the job"
_BLAMED = re.compile(r"(?:rank|each of ranks) (\d+)")  # as a failure detector begins
_OF_KDIST = re.compile(LABEL + rb"(?:\[kdist\]|kdist\.errors\.|\w+Error: .*Received: .*Expected )")  # a TypeError, too
_FIX = re.compile(rb".*\bFix: (.+)")  # the last one of a line
_FIX_OF_AN_EXIT = "read its output, and look for what ends a process: `os._exit`, or a library"
FIX_OF_A_HOST = "check that it runs, and the network that leads to it"
"""What to do where a host was lost."""

_FIX_OF_A_LOSS = (
    "read its output, and the system log of its host: the kernel kills processes that run out of memory, and "
    "schedulers those that exceed their limits"
)

Cause = tuple["int | None", str, str]
"""The rank to blame, what failed, and how to fix it."""


class JobFailure:
    """The failure of a job: a rank's own report, else what a launcher says of a rank.

    Args:
        script: str, the script, of which the summary gives the line.
        host: str, this host if all ranks run on it, else empty.

    Attributes:
        is_known: bool, whether it is known what failed.
    """

    def __init__(self, script: str = "", host: str = "") -> None:
        self.is_known = False
        self._frame = re.compile(LABEL + rb'  File "%s", line (\d+)' % re.escape(os.fsencode(os.path.abspath(script))))
        self._script = os.path.basename(script)
        self._host = host
        self._report: tuple[str, str] | None = None  # of a rank
        self._has_other = False  # whether another rank's report followed
        self._said: Failure | None = None  # by a launcher
        self._line_number = ""
        self._fix = ""

    @property
    def has_lost_host(self) -> bool:
        """Whether a launcher has reported that a host was lost."""
        return self._said is not None and self._said.rank is None

    def read(self, line: bytes) -> None:
        """Reads the next line that ranks print. The first report counts, with the traceback that follows it.

        Args:
            line: bytes, without its end.
        """
        if match := _REPORT.match(line):
            self._has_other = self._report is not None
            if self._report is None:
                self._report = match[1].decode(errors="replace"), match[2].decode(errors="replace")
                self.is_known = True
        if self._report is None or self._has_other:
            return
        if match := self._frame.match(line):
            self._line_number = match[1].decode()
        if _OF_KDIST.match(line) and (match := _FIX.match(line)):
            self._fix = match[1].decode(errors="replace").strip()

    def read_launcher(self, text: bytes) -> bool:
        """Returns whether a launcher's words say which rank failed, or which host was lost, and takes it from them.

        Args:
            text: bytes, the words.
        """
        failure = failure_in(text.decode(errors="replace"))
        if failure is not None:
            self.take(failure)
        return failure is not None

    def take(self, failure: Failure) -> None:
        """Takes what a launcher has reported, unless one has reported before.

        Args:
            failure: `Failure`, of a rank or a host.
        """
        self.is_known = True
        self._said = self._said or failure

    def cause(self, directory: str = "") -> Cause | None:
        """Returns what failed: the rank to blame, words, and how to fix it, empty if kdist does not know.

        Args:
            directory: str, the job's.
        """
        return self._of_a_rank() or self._of_a_launcher(directory)

    def summary(self, code: int, output: str | None = None, directory: str = "", gone: Collection[int] = ()) -> str:
        """Returns what failed, and below it how to fix it if kdist knows; empty if nothing is known.

        Args:
            code: int, the exit code of the job.
            output: str or `None`, the directory of every rank's output.
            directory: str, the job's.
            gone: collection of int, the ranks that the others went on without, with other numbers: those of the files
                are the first ones.
        """
        if not (cause := self.cause(directory)):
            return ""
        rank, what, fix = cause
        if rank is not None and self._of_a_rank():  # a launcher names the first numbers
            rank = [each for each in range(rank + len(gone) + 1) if each not in gone][rank]
        kept = "to keep each rank's output: kdist run --output DIR"
        if output:
            its = f"its output is in {os.path.join(output, f'rank{rank}.err')}, that of the other ranks beside it"
            kept = f"the output of each rank is in {output}" if rank is None else its
        return f"{what}; the job's exit code is {code}; {kept}" + (f"\nFix: {fix}" if fix else "")

    def _of_a_rank(self) -> Cause | None:
        if self._report is None:
            return None
        who, what = self._report
        if what.startswith(_ENDS):
            return self._of_a_detector(who, what.removeprefix(_ENDS).removeprefix(": "))
        line = f" in {self._script}:{self._line_number}" if self._line_number else ""
        return int(who.split()[1]), f"{who} {what}{line}", self._fix

    def _of_a_detector(self, who: str, text: str) -> Cause:
        """Returns what a rank has reported of the job: the rank to blame is the one with which the text begins."""
        if not text:
            return int(who.split()[1]), f"{who} ended the job, for the reason above", self._fix
        cause, *_ = re.split(r"\. | Received: ", text)
        if blamed := _BLAMED.match(cause):
            return int(blamed[1]), cause, self._fix
        received = re.search(r" Received: (.+?)\. Expected ", text)
        return None, f"{cause}: {received[1]}" if received else cause, self._fix

    def _of_a_launcher(self, directory: str) -> Cause | None:
        said = self._said
        if said is None or said.rank is None:
            return None if said is None else (None, said.text, FIX_OF_A_HOST)
        host = said.host or self._host
        place = read_place(directory, said.rank)
        is_exit = said.kind is Kind.EXIT
        who = f"rank {said.rank} on host {host}" if host else f"rank {said.rank}"
        how = f"{said.text}, without a message" if is_exit else said.text
        what = f"{who} {how}, last seen in {place}" if place else f"{who} {how}"
        return said.rank, what, _FIX_OF_AN_EXIT if is_exit else _FIX_OF_A_LOSS
