"""Imports TensorFlow without what its libraries write to standard error when they load."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # at 3, TensorFlow does not say that there is no GPU


def import_quietly(modules: Sequence[str]) -> None:
    """Imports modules; what they write to standard error is shown only if one does not load.

    Args:
        modules: sequence of str, their names.

    Raises:
        ImportError: if one does not load.
    """
    os.environ.setdefault(_LEVEL, "3")
    with _held_back():
        for module in modules:
            importlib.import_module(module)


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Holds back what this process writes to standard error, its C++ libraries included."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            held.seek(0)
            os.write(stderr, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
