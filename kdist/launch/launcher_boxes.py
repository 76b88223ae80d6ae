"""Leaves out what Open MPI's mpirun says of a failure that a rank has reported, and sums the failure up."""

from __future__ import annotations

import os
import re

_REPORT = re.compile(rb"\[kdist\] (rank \d+ of \d+ on host \S+) (raised [\w.]+|exited with code \d+|ends the job)")
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
        self._frame = re.compile(rb'  File "%s", line (\d+)' % re.escape(os.path.abspath(script).encode()))
        self._script = os.path.basename(script)
        self._line = b""  # the last one, if it has not ended
        self._box: list[bytes] = []
        self._report: tuple[str, str] | None = None
        self._line_number = ""
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

    def summary(self, code: int) -> str:
        """Returns what failed, in one line; empty if no rank has reported it.

        Args:
            code: int, the exit code of the job.
        """
        if self._report is None:
            return ""
        who, what = self._report
        line = f" in {self._script}:{self._line_number}" if self._line_number else ""
        how = {"ends": "ended the job, for the reason above"}.get(what.split()[0], what)
        return f"{who} {how}{line}; the job's exit code is {code}"

    def _look(self, line: bytes) -> None:
        if match := _REPORT.match(line):
            self._report = match[1].decode(), match[2].decode()
            self._is_known = True

    def _show(self, line: bytes) -> bytes:
        if not self._box:
            if _RULE.fullmatch(line):
                self._box = [line]
                return b""
            if match := self._frame.match(line):
                self._line_number = match[1].decode()
            return b"" if _ERROR_OF_MPIRUN.match(line) else line
        self._box.append(line)
        if not _RULE.fullmatch(line) and len(self._box) < _MAX_LINES:
            return b""
        box, self._box = b"".join(self._box), []
        return b"" if _OF_MPIRUN.search(box) else box
