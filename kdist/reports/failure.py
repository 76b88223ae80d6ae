"""The end of a job when a rank fails: the error is reported once, and all ranks are aborted."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from kdist._user_code import user_line
from kdist.reports.output import BEGINS_LINE, REPORT_PREFIX
from kdist.reports.scope_marks import own_scopes
from kdist.reports.traceback_text import traceback_text
from kdist.restarts.events import Kind, own_reports

INTERRUPTED = 130  # a shell's exit code for a program that Ctrl-C ended

# Seconds that a rank waits before it reports an error, because another rank may report the cause and end the job.
_DELAY = 1.0
_DELAY_ON_ALL_RANKS = 2.0  # where rank 0 is known to raise the same error
_DELAY_OF_CONSEQUENCES = 5.0  # where this rank fails because another one did, or another one reports a failure
_EXIT_TIMEOUT = 10.0  # seconds after which a process that does not exit is ended

OUTPUT_DELAY = 0.3
"""Seconds for the launcher to forward a report, before it discards what it has not read."""


class EarlyHook:
    """A `sys.excepthook` for one of several ranks without an engine: one traceback, without frames of kdist.

    Python exits afterwards, as it would. Other ranks than the first wait, because the launcher may end them by then.
    A `sys.exit` with an error is reported, too: Python passes it to no hook, and a launcher names no script.

    Args:
        rank: int, this process's number.
        size: int, the number of processes.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._exit: Callable[[Any], NoReturn] = sys.exit

    def install(self) -> None:
        """Sets what Python calls for an error and for `sys.exit`."""
        sys.excepthook = self
        sys.exit = self._exit_with  # type: ignore[assignment]

    def uninstall(self) -> None:
        """Sets what was there before, unless the script has set its own."""
        if sys.excepthook is self:
            sys.excepthook = sys.__excepthook__
        if sys.exit == self._exit_with:
            sys.exit = self._exit  # type: ignore[assignment]

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Prints the traceback; that of Ctrl-C is Python's own."""
        if isinstance(error, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
            return
        if self._rank > 0:
            time.sleep(_DELAY_ON_ALL_RANKS)
        sys.stderr.write(traceback_text(kind, error, trace, os.environ))

    def _exit_with(self, status: Any = None, /) -> NoReturn:
        code = exit_code(SystemExit(status))
        # `sys.exit(main())` has looked this up before `main` may have uninstalled it.
        if code and sys.excepthook is self and not _is_child():
            if self._rank > 0:
                time.sleep(_DELAY_ON_ALL_RANKS)
            sys.stderr.write(
                f"{BEGINS_LINE}{REPORT_PREFIX}{self._rank} of {self._size} on host {platform.node()} exits with code "
                f"{code} before kdist.scope(), in {user_line()}\n"
            )
        self._exit(status)


class FailureHook:
    """A `sys.excepthook` that reports the error with the rank, then ends the job.

    Python does not call it for `SystemExit`; code that catches one may.

    Attributes:
        abort: function of an exit code that ends all ranks and does not return.
        rank: int, this process's number.
        size: int, the number of processes.
        explain: `None`, or a function of an error that returns a more precise one or `None`.
        may_report: `None`, or a function that returns whether no other rank reports a failure.
        before_abort: `None`, or a function of the exit code that is called after the report and before `abort`.
        previous: the hook that was set before; it prints the traceback if it is not Python's own.
    """

    explain: Callable[[BaseException], BaseException | None] | None = None
    may_report: Callable[[], bool] | None = None
    before_abort: Callable[[int], None] | None = None

    def __init__(self, abort: Callable[[int], NoReturn], rank: int, size: int):
        self.abort = abort
        self.rank = rank
        self.size = size
        self.previous = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Reports the error and ends the job: with its code for `SystemExit`, without a report after Ctrl-C."""
        code = exit_code(error)
        if code == 0 or isinstance(error, KeyboardInterrupt):
            self.end(code)
        explained = None
        with contextlib.suppress(Exception):
            explained = None if self.explain is None else self.explain(error)
        if getattr(explained or error, "is_consequence", False):
            time.sleep(_DELAY_OF_CONSEQUENCES)
        elif self.rank > 0:
            time.sleep(_DELAY_ON_ALL_RANKS if getattr(error, "on_all_ranks", False) else _DELAY)
        is_reported = True
        try:
            is_reported = self._report(kind, error, trace, explained)
        except Exception:  # of the report, such as one of `str(error)`: the error itself must be shown
            with contextlib.suppress(Exception):
                sys.stderr.write(f"{BEGINS_LINE}{self._header()} raised {kind.__name__}:\n")
                sys.__excepthook__(kind, error, trace)
        time.sleep(OUTPUT_DELAY if is_reported else _DELAY_OF_CONSEQUENCES)
        self.end(code)

    def end(self, code: int) -> NoReturn:
        """Ends all ranks without a report.

        Args:
            code: int, the exit code, from 0 to 255.
        """
        try:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            if self.before_abort is not None:
                self.before_abort(code)
            self.abort(code)
        finally:
            os._exit(code)

    def fail(self, message: str) -> NoReturn:
        """Reports a failure and ends the job; for other threads than the main one.

        Args:
            message: str, the reason; empty if another rank reports it.
        """
        # The main thread may block for ever in the middle of a write and hold the lock of stderr.
        limit = threading.Timer(_EXIT_TIMEOUT, os._exit, [1])
        limit.daemon = True
        limit.start()
        report = f"{self._header()} ends the job: {message}\n"
        if message and own_scopes.failed(report):
            sys.stderr.write(BEGINS_LINE + report)
            time.sleep(OUTPUT_DELAY)
        self.end(1)

    def _report(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
        explained: BaseException | None,
    ) -> bool:
        """Reports the error, unless another rank reports one; returns whether it has."""
        report(error, is_consequence=getattr(explained or error, "is_consequence", False))
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        is_printed_here = self.previous is sys.__excepthook__
        if isinstance(error, SystemExit):
            message = "" if isinstance(error.code, int) else f": {error.code}"
            text, is_printed_here = f"{self._header()} exited with code {exit_code(error)}{message}\n", True
        else:
            trace_text = traceback_text(kind, error, trace, os.environ) if is_printed_here else ""
            text = f"{self._header()} raised {kind.__name__}:\n{trace_text}"
        # Before the write, which may block for ever.
        if not (own_scopes.failed(text) and (self.may_report is None or self.may_report())):
            if own_scopes.directory is not None and self.rank > 0:  # what has no mark goes to its file alone
                sys.stderr.write(text.replace(REPORT_PREFIX, "kdist (another rank failed first): rank ", 1))
            return False
        sys.stderr.write(BEGINS_LINE + text)  # one write, so that the lines of two ranks do not mix
        if not is_printed_here:
            self.previous(kind, error, trace)
        if explained is not None:
            sys.stderr.write(f"[kdist] Explanation: {explained}\n")
        return True

    def _header(self) -> str:
        return f"{REPORT_PREFIX}{self.rank} of {self.size} on host {platform.node()}"


def install(
    abort: Callable[[int], NoReturn],
    rank: int,
    size: int,
    explain: Callable[[BaseException], BaseException | None] | None = None,
    before_abort: Callable[[int], None] | None = None,
) -> FailureHook:
    """Makes an uncaught exception on this rank end the whole job.

    Called again, it updates the hook that is installed. Exceptions in threads do not end the process, as in Python.

    Args:
        abort: function of an exit code that ends all ranks and does not return.
        rank: int, this process's number.
        size: int, the number of processes.
        explain: see `FailureHook`; `None` keeps the last one.
        before_abort: see `FailureHook`; `None` keeps the last one.

    Returns:
        The hook that is installed.
    """
    uninstall_early_hook()  # this one takes its place
    hook = sys.excepthook
    if isinstance(hook, FailureHook):
        hook.abort, hook.rank, hook.size = abort, rank, size
    else:
        hook = sys.excepthook = FailureHook(abort, rank, size)
    if explain is not None:
        hook.explain = explain
    if before_abort is not None:
        hook.before_abort = before_abort
    return hook


def _is_child() -> bool:
    """Returns whether `multiprocessing` started this process for a rank."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def uninstall_early_hook() -> None:
    """Lets errors and exits pass as without kdist, as those of its own commands: they are no script's."""
    if isinstance(sys.excepthook, EarlyHook):
        sys.excepthook.uninstall()


def report(error: BaseException, *, is_consequence: bool = False) -> None:
    """Reports an uncaught exception of this rank to a supervisor.

    Args:
        error: the exception.
        is_consequence: bool, whether another rank's end is the cause.
    """
    code = exit_code(error)
    if isinstance(error, SystemExit) and code:
        own_reports.failed(Kind.EXIT, f"exited with code {code}", own_reports.rank)
    elif code and not isinstance(error, KeyboardInterrupt):
        own_reports.failed(
            Kind.EXCEPTION,
            f"raised {type(error).__name__}: {error}",
            own_reports.rank,
            is_consequence=is_consequence,
            comes_again=getattr(error, "on_all_ranks", False) or isinstance(error, (ImportError, SyntaxError)),
        )


def exit_code(error: BaseException) -> int:
    """Returns the exit code of Python for an uncaught exception, as a shell reports it.

    Args:
        error: the uncaught exception.

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
