"""How a rank that fails says so once and takes the whole job down, so that no other rank waits for it."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from kdist.launch.output import REPORT

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended

# Seconds that the other ranks leave to rank 0, which may be about to report the same error and end the job. They
# report it themselves after that: nothing is ever swallowed.
_HEAD_START = 1.0
_HEAD_START_ON_ALL_RANKS = 2.0
_LAST_WORDS = 0.3  # seconds for the launcher to pass the report on, before it throws away what it has not read yet


class FailureHook:
    """A `sys.excepthook` that names the rank, then ends the job.

    Python does not call it for `SystemExit`; who catches one on its way out may.

    Attributes:
        abort: function of an exit code that ends all ranks and does not return.
        rank: int, this process's number.
        size: int, the number of processes.
        previous: the hook that was there before; it prints the traceback if it is not Python's own.
    """

    def __init__(self, abort: Callable[[int], NoReturn], rank: int, size: int):
        self.abort = abort
        self.rank = rank
        self.size = size
        self.previous = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Reports the error and ends the job: with its own code for `SystemExit`, quietly after Ctrl-C."""
        code = exit_code(error)
        if code == 0 or isinstance(error, KeyboardInterrupt):
            self.end(code)
        if self.rank > 0:
            time.sleep(_HEAD_START_ON_ALL_RANKS if getattr(error, "on_all_ranks", False) else _HEAD_START)
        with contextlib.suppress(Exception):
            self._report(kind, error, trace)
        time.sleep(_LAST_WORDS)
        self.end(code)

    def end(self, code: int) -> NoReturn:
        """Ends all ranks, without a word.

        Args:
            code: int, the exit code, from 0 to 255.
        """
        try:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            self.abort(code)
        finally:
            os._exit(code)

    def _report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        head = f"{REPORT}{self.rank} of {self.size} on host {platform.node()}"
        if isinstance(error, SystemExit):
            said = "" if isinstance(error.code, int) else f": {error.code}"
            head = text = f"{head} exited with code {exit_code(error)}{said}\n"
        else:
            head = f"{head} raised {kind.__name__}:\n"
            text = head + "".join(traceback.format_exception(kind, error, trace))
        # One write each, so that the lines of two ranks do not mingle.
        if self.previous is sys.__excepthook__ or isinstance(error, SystemExit):
            sys.stderr.write(text)
        else:
            sys.stderr.write(head)
            self.previous(kind, error, trace)


def install(abort: Callable[[int], NoReturn], rank: int, size: int) -> FailureHook:
    """Makes an uncaught exception on this rank end the whole job.

    Called again, it only takes over `abort`: a hook is never installed twice. Threads keep Python's own
    behaviour: an exception in one of them does not end the process.

    Args:
        abort: function of an exit code that ends all ranks and does not return.
        rank: int, this process's number.
        size: int, the number of processes.

    Returns:
        The hook that is in place.
    """
    hook = sys.excepthook
    if isinstance(hook, FailureHook):
        hook.abort, hook.rank, hook.size = abort, rank, size
    else:
        hook = sys.excepthook = FailureHook(abort, rank, size)
    return hook


def exit_code(error: BaseException) -> int:
    """Returns the code that Python ends with for an error, as a shell sees it.

    Args:
        error: the exception that nobody caught.

    Returns:
        An int from 0 to 255.
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1
