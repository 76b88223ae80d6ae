"""Leaves out what Open MPI's mpirun says of a failure that a rank has reported, and sums the failure up."""

from __future__ import annotations

import os
import re

from kdist.restarts.launcher_words import failure_in
from kdist.restarts.report import Kind

_LABEL = rb"(?:\[rank \d+ [\d:]+\] )?"  # of --tee
_REPORT = re.compile(
    _LABEL + rb"\[kdist\] (rank \d+ of \d+ on host \S+) (raised [\w.]+|(?:exited with code \d+|ends the job)(?:: .*)?)"
)
_ENDS = "ends the job"
_OF_KDIST = re.compile(_LABEL + rb"(?:\[kdist\]|kdist\.errors\.)")
_FIX = re.compile(rb".*\bFix: (.+)")  # the last one of a line
_LINES_OF_A_CAUSE = 3  # of a sentence about a rank, in a box
_RULE = re.compile(rb"-{60,}\r?\n")
_OF_MPIRUN = re.compile(rb"prterun|mpirun|MPI_ABORT|PRTE")
_ERROR_OF_MPIRUN = re.compile(rb"\[[^\]\s]+:\d+\] PMIX ERROR")
_MAX_LINES = 40  # of a box; with more it is none


class BoxFilter:
    """A filter of the launcher's standard error. Before a rank has reported a failure, all passes through at once.

    Args:
        script: str, the script, of which the summary gives the line.
    """

    def __init__(self, script: str = "") -> None:
        self._frame = re.compile(_LABEL + rb'  File "%s", line (\d+)' % re.escape(os.path.abspath(script).encode()))
        self._script = os.path.basename(script)
        self._line = b""  # the last one, if it has not ended
        self._box: list[bytes] = []
        self._report: tuple[str, str] | None = None
        self._line_number = ""
        self._fix = ""
        self._last: list[bytes] = []  # of the lines before a report
        self._is_known = False

    def know(self) -> None:
        """Leaves out boxes from now on: kdist itself has said what failed."""
        self._is_known = True

    def feed(self, piece: bytes) -> bytes:
        """Returns what is shown of the next output.

        Args:
            piece: bytes.
        """
        shown = b"" if self._is_known else piece
        *lines, rest = (self._line + piece).split(b"\n")
        for place, line in enumerate(lines):
            if self._is_known:
                shown += self._show(line + b"\n")
            else:
                self._look(line)
                if self._is_known:  # from the next line on
                    tail = b"\n".join([*lines[place + 1 :], rest])
                    shown = piece[: len(piece) - len(tail)] if len(tail) <= len(piece) else b""
        self._line = rest
        return shown

    def finish(self) -> bytes:
        """Returns what was held back and is shown in the end."""
        held = b"".join(self._box) + (self._line if self._is_known else b"")
        # mpirun's last box may end in a NUL.
        return b"" if _OF_MPIRUN.search(held) or not held.strip(b" \0\r\n") else held

    def summary(self, code: int, output: str | None = None) -> str:
        """Returns what failed, and below it how to fix it if kdist knows; empty if nothing is known.

        Args:
            code: int, the exit code of the job.
            output: str or `None`, the directory of every rank's output.
        """
        if self._report is None:
            return ""
        rank = self._report[0].split()[1]
        kept = (
            f"its output is in {os.path.join(output, f'rank{rank}.err')}, that of the other ranks beside it"
            if output
            else "--output DIR keeps the output of each rank"
        )
        fix = f"\nFix: {self._fix}" if self._fix else ""
        return f"{self._failure()}; the job's exit code is {code}; {kept}{fix}"

    def _failure(self) -> str:
        if self._report is None:
            return ""
        who, what = self._report
        line = f" in {self._script}:{self._line_number}" if self._line_number else ""
        how = what
        if what.startswith(_ENDS):
            cause = re.split(r"\. | Received: ", what[len(_ENDS) :])[0]
            how = f"ended the job{cause or ', for the reason above'}"
        return f"{who} {how}{line}"

    def _look(self, line: bytes) -> None:
        if match := _REPORT.match(line):
            self._report = match[1].decode(), match[2].decode()
            self._is_known = True
            self._look_for_fix(line)
            return
        self._last = [*self._last, line][-_LINES_OF_A_CAUSE:]
        failure = failure_in(b"\n".join(self._last).decode(errors="replace"))
        if failure is None or failure.rank is None:
            return
        where = f" on host {failure.host}" if failure.host else ""
        if failure.kind is Kind.SIGNAL:
            self._report = f"rank {failure.rank}{where}", failure.text
            self._fix = (
                "read its output, and the system log of its host: the kernel kills processes that run out of memory, "
                "and schedulers those that exceed their limits"
            )
        else:
            self._report = f"rank {failure.rank}{where}", f"{failure.text}, without a message"
            self._fix = "read its output, and look for what ends a process: `os._exit`, or a library"

    def _look_for_fix(self, line: bytes) -> None:
        if _OF_KDIST.match(line) and (match := _FIX.match(line)):
            self._fix = match[1].decode(errors="replace").strip()

    def _show(self, line: bytes) -> bytes:
        if not self._box:
            if _RULE.fullmatch(line):
                self._box = [line]
                return b""
            if match := self._frame.match(line):
                self._line_number = match[1].decode()
            self._look_for_fix(line)
            return b"" if _ERROR_OF_MPIRUN.match(line) else line
        self._box.append(line)
        if not _RULE.fullmatch(line) and len(self._box) < _MAX_LINES:
            return b""
        box, self._box = b"".join(self._box), []
        return b"" if _OF_MPIRUN.search(box) else box
