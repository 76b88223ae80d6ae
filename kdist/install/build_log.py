"""What a build says: how far it is, and what went wrong first."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]")
# The words of errors: those of compilers and linkers say more than CMake's or Python's, in which they may stand. Not
# pip's "error: subprocess-exited-with-error", and not CMake's tests of `-Werror=...`.
_ERRORS = (
    re.compile(r":\d+: (?:fatal )?error: |undefined reference to|cannot find -l|internal compiler error|No space left"),
    re.compile(r"\bCMake Error\b|: command not found|: not found$|\bKilled\b"),
    re.compile(r": No module named |^\s*\w*(?:Error|Exception): "),
)


def percent(line: str) -> int | None:
    """Returns how much of the build is done after this line, from 0 to 100, if it says so."""
    match = _PERCENT.match(line)
    return None if match is None else int(match[1])


def first_error(lines: Iterable[str], context: int = 3) -> str:
    """Returns the first line that tells of an error, and what follows it.

    Later errors follow from the first one; pip's own, at the end, only say that there was one.

    Args:
        lines: iterable of str, the log.
        context: int, how many lines after it are returned too.

    Returns:
        A str of several lines; the last lines of the log, if none tells of an error.
    """
    lines = [line.rstrip() for line in lines]
    for pattern in _ERRORS:
        for place, line in enumerate(lines):
            if pattern.search(line):
                return "\n".join(lines[place : place + 1 + context])
    return "\n".join(lines[-context - 1 :])
