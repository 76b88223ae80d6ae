"""Imports TensorFlow and Keras without the output of its libraries on standard error."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # at 3, TensorFlow does not warn that there is no GPU


def import_keras_quietly() -> None:
    """Imports TensorFlow and Keras, and shows their standard error only if an import fails.

    Raises:
        ImportError: if an import fails.
    """
    os.environ.setdefault(_LEVEL, "3")
    with _buffered_stderr():
        for module in ("tensorflow", "keras"):
            importlib.import_module(module)


@contextlib.contextmanager
def _buffered_stderr() -> Iterator[None]:
    """Buffers the standard error of this process, its C++ libraries included; shows it only after an error."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as buffer:
        os.dup2(buffer.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            buffer.seek(0)
            os.write(stderr, buffer.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
