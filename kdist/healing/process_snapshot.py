"""Makes a process ready to run its script again: what the first run has left in Python, Keras and TensorFlow."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import random
import sys

from kdist._user_code import is_users

_PACKAGE = __name__.partition(".")[0]


class ProcessSnapshot:
    """The state of a process before its script, which is restored before the script runs again."""

    def __init__(self) -> None:
        self._path, self._directory = list(sys.path), os.getcwd()

    def restore(self) -> None:
        """Restores it, and frees what the script has made.

        What a script sets for good in the process stays set: environment variables, signal handlers, `atexit`. So does
        what TensorFlow refuses to change once it has begun: devices and threads.
        """
        added = list(sys.path)
        for each in self._path:
            if each in added:
                added.remove(each)
        sys.path[:] = self._path
        os.chdir(self._directory)
        _forget_modules(tuple(os.path.join(os.path.abspath(each), "") for each in added))
        _clear_log()
        _clear_keras()
        gc.collect()


def _forget_modules(directories: tuple[str, ...]) -> None:
    """Lets the script import its own modules again: they may hold a model of the ranks of before."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_own = isinstance(file, str) and os.path.abspath(file).startswith(directories) and is_users(file)
        if is_own and name.partition(".")[0] != _PACKAGE:
            del sys.modules[name]
    importlib.invalidate_caches()


def has_gpu() -> bool:
    """Returns whether TensorFlow, if it is loaded, computes on a GPU in this process."""
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and bool(tensorflow.config.get_visible_devices("GPU"))


def _clear_log() -> None:
    """Removes the handlers of kdist's log, whose lines begin with the rank; the scope adds one again."""
    log = logging.getLogger(_PACKAGE)
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.NOTSET)


def _clear_keras() -> None:
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(None)
    if "keras" in sys.modules:
        keras = sys.modules["keras"]
        keras.utils.clear_session()
        keras.config.enable_interactive_logging()
