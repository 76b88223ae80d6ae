"""The object that `kdist.scope` returns: a context manager, or a decorator, that tells if it was never entered."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from kdist._process import cluster_info
from kdist._user_code import user_line
from kdist.errors import KDistError
from kdist.reports.log import show_log

if TYPE_CHECKING:
    import tensorflow as tf

_LOG = logging.getLogger("kdist")


class ScopeContext(contextlib.ContextDecorator, contextlib.AbstractContextManager["tf.distribute.Strategy"]):
    """Opens the scope while the context is open.

    Args:
        make: function that returns the context manager which opens the scope.
    """

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[tf.distribute.Strategy]]) -> None:
        self._make = make
        self._opened: list[contextlib.AbstractContextManager[tf.distribute.Strategy]] = []
        self._was_entered = False
        self._line = user_line()

    def __enter__(self) -> tf.distribute.Strategy:
        self._was_entered = True
        context = self._make()
        try:
            strategy = context.__enter__()
        except KDistError:
            self._report_on_one_rank()
            raise
        self._opened.append(context)
        return strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._opened.pop().__exit__(kind, error, trace)

    def _report_on_one_rank(self) -> None:
        """Lets one rank print the error that all have, where no engine has done so yet: under a launcher's command."""
        from kdist.launchers.worker import end_job
        from kdist.reports import failure

        with contextlib.suppress(KDistError):  # of the launcher's variables
            info = cluster_info()
            if info.size > 1 and not isinstance(sys.excepthook, failure.FailureHook):
                failure.install(end_job, info.rank, info.size)

    def __del__(self) -> None:
        if self._was_entered or sys.is_finalizing():
            return
        with contextlib.suppress(KDistError):  # of the launcher's variables
            info = cluster_info()
            if info.size > 1 and info.is_chief:
                show_log(info)
                _LOG.warning(
                    "kdist.scope() was never entered: each of the %d ranks trains by itself. Received: kdist.scope() "
                    "in %s. Expected `with kdist.scope():`. Fix: add `with`, and indent the lines that make and fit "
                    "the model.",
                    info.size, self._line,
                )  # fmt: skip
