"""The log of a build: its progress and its first error."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]")
# Patterns of errors, the most informative first: compilers and linkers, then CMake, then Python, which quote them. Not
# pip's "error: subprocess-exited-with-error", and not CMake's tests of `-Werror=...`.
_ERRORS = (
    re.compile(r":\d+: (?:fatal )?error: |undefined reference to|cannot find -l|internal compiler error|No space left"),
    re.compile(r"\bCMake Error\b|: command not found|: not found$|\bKilled\b"),
    re.compile(r": No module named |^\s*\w*(?:Error|Exception): "),
)


def percent(line: str) -> int | None:
    """Returns the progress of the build in percent if this line has it, or `None`."""
    match = _PERCENT.match(line)
    return None if match is None else int(match[1])


def first_error(lines: Iterable[str], context: int = 3) -> str:
    """Returns the first line with an error, and the lines after it.

    Later errors are consequences of the first one.

    Args:
        lines: iterable of str, the log.
        context: int, how many lines after it are returned too.

    Returns:
        A str of several lines; without an error the last lines of the log.
    """
    lines = [line.rstrip() for line in lines]
    for pattern in _ERRORS:
        for place, line in enumerate(lines):
            if pattern.search(line):
                return "\n".join(lines[place : place + 1 + context])
    return "\n".join(lines[-context - 1 :])
