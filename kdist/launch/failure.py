"""How a rank that fails says so once and takes the whole job down, so that no other rank waits for it."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
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
_HEAD_START_OF_THE_FIRST = 5.0  # where this rank fails because another one did
_LAST_RESORT = 10.0  # seconds after which a process is ended that does not end well

LAST_WORDS = 0.3
"""Seconds for the launcher to pass a report on, before it throws away what it has not read yet."""


class FailureHook:
    """A `sys.excepthook` that names the rank, then ends the job.

    Python does not call it for `SystemExit`; who catches one on its way out may.

    Attributes:
        abort: function of an exit code that ends all ranks and does not return.
        rank: int, this process's number.
        size: int, the number of processes.
        explain: function of an error, giving another one that says more, or `None`.
        before_end: function of the exit code, called when this rank ends the job, having said why; or `None`.
        previous: the hook that was there before; it prints the traceback if it is not Python's own.
    """

    explain: Callable[[BaseException], BaseException | None] | None = None
    before_end: Callable[[int], None] | None = None

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
        explained = None
        with contextlib.suppress(Exception):
            explained = None if self.explain is None else self.explain(error)
        if getattr(explained or error, "is_echo", False):
            time.sleep(_HEAD_START_OF_THE_FIRST)
        elif self.rank > 0:
            time.sleep(_HEAD_START_ON_ALL_RANKS if getattr(error, "on_all_ranks", False) else _HEAD_START)
        with contextlib.suppress(Exception):
            self._report(kind, error, trace, explained)
        time.sleep(LAST_WORDS)
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
            if self.before_end is not None:
                self.before_end(code)
            self.abort(code)
        finally:
            os._exit(code)

    def stop(self, text: str) -> NoReturn:
        """Says why the job must end, and ends it; for a thread that watches over the ranks.

        Args:
            text: str, the reason; empty if another rank says it.
        """
        # What the main thread holds must not keep this one: it may be stopped for good in the middle of a write.
        limit = threading.Timer(_LAST_RESORT, os._exit, [1])
        limit.daemon = True
        limit.start()
        if text:
            sys.stderr.write(f"{REPORT}{self.rank} of {self.size} on host {platform.node()} ends the job: {text}\n")
            time.sleep(LAST_WORDS)
        self.end(1)

    def _report(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
        explained: BaseException | None,
    ) -> None:
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
        if explained is not None:
            sys.stderr.write(f"[kdist] that is: {explained}\n")


def install(
    abort: Callable[[int], NoReturn],
    rank: int,
    size: int,
    explain: Callable[[BaseException], BaseException | None] | None = None,
    before_end: Callable[[int], None] | None = None,
) -> FailureHook:
    """Makes an uncaught exception on this rank end the whole job.

    Called again, it only takes over the arguments: a hook is never installed twice. Threads keep Python's own
    behaviour: an exception in one of them does not end the process.

    Args:
        abort: function of an exit code that ends all ranks and does not return.
        rank: int, this process's number.
        size: int, the number of processes.
        explain: function of an error, giving another one that says more, or `None`.
        before_end: function of the exit code, called when this rank ends the job, having said why; or `None`.

    Returns:
        The hook that is in place.
    """
    hook = sys.excepthook
    if isinstance(hook, FailureHook):
        hook.abort, hook.rank, hook.size = abort, rank, size
    else:
        hook = sys.excepthook = FailureHook(abort, rank, size)
    if explain is not None:
        hook.explain = explain
    if before_end is not None:
        hook.before_end = before_end
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
