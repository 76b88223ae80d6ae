"""What `kdist run` knows of a job's failure, from what ranks and launchers say, and the summary of it."""

from __future__ import annotations

import os
import re

from kdist.restarts.launcher_words import failure_in
from kdist.restarts.report import Failure, Kind, read_place

LABEL = rb"(?:\[\d+,?\d*\]<std(?:err|out)>: ?)?(?:\[rank \d+ [\d:]+\] )?"
"""What horovodrun and `--tee` put before a line, as a regular expression."""

_REPORT = re.compile(
    LABEL + rb"\[kdist\] (rank \d+ of \d+ on host \S+) (raised [\w.]+|(?:exited with code \d+|ends the job)(?:: .*)?)"
)
_ENDS = "ends the job"
_OF_KDIST = re.compile(LABEL + rb"(?:\[kdist\]|kdist\.errors\.)")
_FIX = re.compile(rb".*\bFix: (.+)")  # the last one of a line
_FIX_OF_AN_EXIT = "read its output, and look for what ends a process: `os._exit`, or a library"
_FIX_OF_A_LOSS = (
    "read its output, and the system log of its host: the kernel kills processes that run out of memory, and "
    "schedulers those that exceed their limits"
)


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
        self._frame = re.compile(LABEL + rb'  File "%s", line (\d+)' % re.escape(os.path.abspath(script).encode()))
        self._script = os.path.basename(script)
        self._host = host
        self._report: tuple[str, str] | None = None  # of a rank
        self._has_other = False  # whether another rank's report followed
        self._said: Failure | None = None  # by a launcher
        self._line_number = ""
        self._fix = ""

    def read(self, line: bytes) -> None:
        """Reads the next line that ranks print. The first report counts, with the traceback that follows it.

        Args:
            line: bytes, without its end.
        """
        if match := _REPORT.match(line):
            self._has_other = self._report is not None
            if self._report is None:
                self._report = match[1].decode(), match[2].decode()
                self.is_known = True
        if self._report is None or self._has_other:
            return
        if match := self._frame.match(line):
            self._line_number = match[1].decode()
        if _OF_KDIST.match(line) and (match := _FIX.match(line)):
            self._fix = match[1].decode(errors="replace").strip()

    def read_launcher(self, text: bytes) -> bool:
        """Returns whether a launcher's words say which rank failed, and takes it from them.

        Args:
            text: bytes, the words.
        """
        failure = failure_in(text.decode(errors="replace"))
        if failure is None or failure.rank is None:
            return False
        self.take(failure)
        return True

    def take(self, failure: Failure) -> None:
        """Takes what a launcher has reported, unless one has reported before.

        Args:
            failure: `Failure`, of a rank.
        """
        self.is_known = True
        self._said = self._said or failure

    def summary(self, code: int, output: str | None = None, directory: str = "") -> str:
        """Returns what failed, and below it how to fix it if kdist knows; empty if nothing is known.

        Args:
            code: int, the exit code of the job.
            output: str or `None`, the directory of every rank's output.
            directory: str, the job's.
        """
        if self._report is not None:
            rank, what, fix = self._report[0].split()[1], self._of_a_rank(*self._report), self._fix
        elif self._said is not None:
            rank, what, fix = str(self._said.rank), self._of_a_launcher(self._said), _FIX_OF_A_LOSS
            if self._said.kind is Kind.EXIT:
                what, fix = f"{what}, without a message", _FIX_OF_AN_EXIT
            if place := read_place(directory, self._said.rank):
                what += f", last seen in {place}"
        else:
            return ""
        kept = (
            f"its output is in {os.path.join(output, f'rank{rank}.err')}, that of the other ranks beside it"
            if output
            else "--output DIR keeps the output of each rank"
        )
        return f"{what}; the job's exit code is {code}; {kept}" + (f"\nFix: {fix}" if fix else "")

    def _of_a_rank(self, who: str, what: str) -> str:
        line = f" in {self._script}:{self._line_number}" if self._line_number else ""
        if what.startswith(_ENDS):
            cause = re.split(r"\. | Received: ", what[len(_ENDS) :])[0]
            what = f"ended the job{cause or ', for the reason above'}"
        return f"{who} {what}{line}"

    def _of_a_launcher(self, failure: Failure) -> str:
        host = failure.host or self._host
        return f"rank {failure.rank}{f' on host {host}' if host else ''} {failure.text}"
