"""Warns of a `fit` outside of a scope in a job of several ranks, where each would train a model of its own.

A script that enters no scope may call nothing of kdist, and may import Keras after it. So `import kdist` registers for
the import of Keras, in a process that a launcher started with others, and does nothing in all other processes. There it
also sets what Python calls for an error before the scope, and for `breakpoint()`: ranks share one terminal.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist._user_code import user_line
from kdist.cluster import detect
from kdist.cluster.info import ClusterInfo
from kdist.errors import KDistError
from kdist.reports import breakpoint_hook
from kdist.reports.failure import EarlyHook
from kdist.reports.log import show_log
from kdist.reports.scope_marks import own_scopes

_LOG = logging.getLogger("kdist")


def watch(env: Mapping[str, str]) -> None:
    """Warns of the first `fit` outside of a scope if this process is one of several ranks, and sets their hooks.

    Args:
        env: mapping, the environment.
    """
    try:
        info = detect(env)
    except KDistError:
        return  # the scope refuses it
    if info.size > 1:
        after_import("keras", functools.partial(_watch_keras, info))
        if not os.isatty(0):  # a rank in a terminal of its own can stop there
            breakpoint_hook.install(info, env)
        if sys.excepthook is sys.__excepthook__:
            EarlyHook(info.rank, info.size).install()


def after_import(name: str, action: Callable[[], None]) -> None:
    """Calls a function once a package has been imported: now, if it has been.

    Args:
        name: str, a top-level package.
        action: function that is called without arguments.
    """
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action
        self._is_searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                del loader.exec_module
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                execute(module)
                self._action()

            loader.exec_module = exec_module  # of this one loader
        return spec


def _watch_keras(info: ClusterInfo) -> None:
    import keras

    if keras.config.backend() != "tensorflow":
        return  # the scope refuses it
    try:
        from kdist.data.pipelines.eager_order import count_iterations
        from kdist.keras_hooks.trainer import watch_first_fit

        watch_first_fit(functools.partial(_is_reported, info))
        count_iterations()  # before the scope, too
    except Exception:  # of an unknown Keras; the user's import of it must not fail
        _LOG.debug("a fit outside of the scope is not seen", exc_info=True)


def _is_reported(info: ClusterInfo, callbacks: Any) -> bool:
    """Warns of a `fit` that begins now, if it is outside of a scope; returns whether no other one needs a look."""
    if own_scopes.is_open:
        return False
    given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    if any(getattr(each, "_given_engine", None) is not None for each in given):
        own_scopes.mark_alone()  # trains without a scope on purpose
    elif info.is_chief and not own_scopes.trains_alone:
        show_log(info)
        _LOG.warning(
            "fit runs outside of kdist.scope(): each of the %d ranks trains a model of its own. Received: %s under %s. "
            "Expected a model of the scope. Fix: put the lines that make and fit the model into `with kdist.scope():`; "
            "%d separate trainings: `with kdist.scope(\"single\"):`.",
            info.size, user_line(), info.launcher, info.size,
        )  # fmt: skip
    return True
