"""Leaves out what the launchers that are not kdist's say of a failure, once it is known what failed."""

from __future__ import annotations

import re

from kdist.reports.job_failure import LABEL, JobFailure
from kdist.reports.output import without_startup_lines

_WIDTH_OF_MPIRUN = 74
_RULE = re.compile(rb"-{60,}\r?\n")
_RULE_OF_MPIRUN = re.compile(rb"-{%d}\r?\n" % _WIDTH_OF_MPIRUN)
_OF_MPIRUN = re.compile(rb"prterun|mpirun|MPI_ABORT|PRTE|\bORTE\b")
_SAYS_NOTHING = re.compile(rb"Primary job\s+terminated normally, but")  # a box of Open MPI 4; another one follows it
_ERROR_OF_MPIRUN = re.compile(rb"\[[^\]\s]+:\d+\] PMIX ERROR")
_MAX_LINES = 40  # of a box; with more it is none

_LABEL_OF_A_LINE = rb"\[(?:\d+\]<std(?:err|out)>:|\d+,\d+\]<std(?:err|out)>: ?)"  # with Gloo; with MPI
_LABELLED = re.compile(_LABEL_OF_A_LINE)
_LABELS = re.compile(rb"(?:^|(?<=\r))" + _LABEL_OF_A_LINE)  # a progress bar begins its line again and again
_OF_A_SHELL = re.compile(rb"\[\d+,?\d*\]<stderr>: ?(?:Killed|Terminated)\s*")  # in which horovodrun starts a rank
_OF_A_LOSS = re.compile(LABEL + rb"(?:.*Local rendezvous is aborting with status: |\t \[\[\{\{)")  # of TensorFlow's
_WORDS_OF_AN_END = rb"Process \d+ exit with status code -?\d+\.|Terminating remaining workers after failure of Process"
_AFTER_A_LINE = re.compile(rb"(?:%s).*" % _WORDS_OF_AN_END)  # which a rank has not ended
_OF_AN_END = re.compile(rb"-{60,}|Traceback \(most recent|%s" % _WORDS_OF_AN_END)


class _LineFilter:
    """A filter of a stream by whole lines; the beginning of a line is shown where that is allowed.

    Args:
        failure: `JobFailure`, which learns what ranks and the launcher say.
    """

    def __init__(self, failure: JobFailure) -> None:
        self._failure = failure
        self._held: list[bytes] = []  # whole lines
        self._line = b""  # the last one, if it has not ended
        self._num_shown = 0  # bytes of it that have been shown

    def feed(self, piece: bytes) -> bytes:
        """Returns what is shown of the next output.

        Args:
            piece: bytes.
        """
        *lines, rest = (self._line + piece).split(b"\n")
        shown = b""
        for line in lines:
            shown += self._show(line + b"\n")[self._num_shown :]
            self._num_shown = 0
        beginning = self._shown_beginning(rest)
        shown += beginning[self._num_shown :]
        self._line, self._num_shown = rest, max(self._num_shown, len(beginning))
        if beginning:
            self._forget_before(rest.rfind(b"\r"))
        return shown

    def _forget_before(self, end: int) -> None:
        """Keeps of the last line, shown as far as it can be, its label and the end: a progress bar has no length."""
        label = _LABELLED.match(self._line)
        begin = label.end() if label else 0
        if end > begin:
            self._line = self._line[:begin] + self._line[end:]
            self._num_shown = len(self._shown_beginning(self._line))

    def finish(self) -> bytes:
        """Returns what was held back and is shown in the end."""
        held = b"".join(self._held) + self._line[self._num_shown :]
        self._held, self._line, self._num_shown = [], b"", 0
        # mpirun's last box may end in a NUL.
        return b"" if not held.strip(b" \0\r\n") or self._is_known(held) else held

    def _show(self, line: bytes) -> bytes:
        """Returns what is shown after a line has ended."""
        raise NotImplementedError

    def _shown_beginning(self, line: bytes) -> bytes:
        """Returns what is shown of a line before it has ended."""
        raise NotImplementedError

    def _is_known(self, words: bytes) -> bool:
        """Returns whether what the launcher says is known, now that it has been read."""
        return self._failure.read_launcher(words) or self._failure.is_known


class BoxFilter(_LineFilter):
    """A filter of the standard error of Open MPI's mpirun: it leaves out boxes that say what is known.

    Before anything is known, all passes through at once, but what may be a box that names the rank that failed.

    Args:
        failure: `JobFailure`, which learns what ranks and boxes say.
    """

    def _show(self, line: bytes) -> bytes:
        if not self._held:
            # A script's own line of that length waits for its next line; others are shown at once.
            if (_RULE if self._failure.is_known else _RULE_OF_MPIRUN).fullmatch(line) and not self._num_shown:
                self._held = [line]
                return b""
            self._failure.read(line.rstrip(b"\n"))
            return b"" if self._failure.is_known and _ERROR_OF_MPIRUN.match(line) else line
        self._held.append(line)
        is_box = self._failure.is_known or _OF_MPIRUN.search(self._held[1]) or _SAYS_NOTHING.search(self._held[1])
        if is_box and not _RULE.fullmatch(line) and len(self._held) < _MAX_LINES:
            return b""
        box, self._held = b"".join(self._held), []
        return b"" if self._is_known(box) else box

    def _shown_beginning(self, line: bytes) -> bytes:
        may_be_rule = not line.strip(b"-") and len(line) <= _WIDTH_OF_MPIRUN
        return b"" if self._failure.is_known or self._held or may_be_rule else line

    def _is_known(self, words: bytes) -> bool:
        return bool(_SAYS_NOTHING.search(words) or (_OF_MPIRUN.search(words) and super()._is_known(words)))


class UnlabelledFilter(_LineFilter):
    """A filter of a stream of horovodrun's, which labels what ranks print: other lines are its own.

    The labels are left out: lines look as with every launcher, and `--tee` has labels of its own. What horovodrun says
    when the job ends is held back, and left out if it is known what failed.

    Args:
        failure: `JobFailure`, which learns what ranks and horovodrun say.
    """

    def finish(self) -> bytes:
        """Returns what was held back and is shown in the end."""
        of_a_rank = b""
        if _LABELLED.match(self._line):  # it has not ended its last line
            of_a_rank, self._line, self._num_shown = _unlabelled(self._line)[self._num_shown :], b"", 0
        return of_a_rank + super().finish()

    def _show(self, line: bytes) -> bytes:
        if _LABELLED.match(line):
            self._failure.read(line.rstrip(b"\n"))
            return b"" if _OF_A_SHELL.fullmatch(line) or _OF_A_LOSS.match(line) else _unlabelled(line)
        if self._held or self._failure.is_known or _OF_AN_END.match(line):
            self._held.append(line)
            return b""
        return without_startup_lines(line)  # rank 0 shows them

    def _shown_beginning(self, line: bytes) -> bytes:
        # horovodrun writes a progress bar from one carriage return to the next.
        return _unlabelled(line[: line.rfind(b"\r") + 1]) if _LABELLED.match(line) else b""


def _unlabelled(line: bytes) -> bytes:
    """Returns what a rank has printed of a line."""
    return _LABELS.sub(b"", _AFTER_A_LINE.sub(b"", line))


def filters(failure: JobFailure, *, boxes: bool, labels: bool) -> tuple[_LineFilter | None, _LineFilter | None]:
    """Returns the filters of a launcher's standard error and standard output; `None` where all is shown.

    Args:
        failure: `JobFailure`, which learns what ranks and the launcher say.
        boxes: bool, whether the launcher reports failures in boxes, as Open MPI's mpirun does.
        labels: bool, whether it labels what ranks print, as horovodrun does.
    """
    if labels:
        return UnlabelledFilter(failure), UnlabelledFilter(failure)
    return (BoxFilter(failure) if boxes else None), None
