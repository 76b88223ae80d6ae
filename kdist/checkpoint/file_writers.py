"""Callbacks that write files, run without writing on the ranks that do not write."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

import keras

from kdist.engines.engine import Engine
from kdist.keras_hooks.fit.callbacks import (
    LOAD_MODEL,
    SAVE_MODEL,
    SHOULD_SAVE,
    checkpoint_decision,
    checkpoint_parts,
    saves_as_keras_does,
)
from kdist.keras_hooks.patching import patched

ONLY_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
    *filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]),
)
"""Keras' callbacks that only write: other ranks need not run them."""


def without_writing(callback: Any, undo: contextlib.ExitStack, *, sends_parts: bool = False) -> Any | None:
    """Returns a callback that does not write, or `None` if it only writes.

    A user's subclass may do more, such as evaluate, which needs all ranks: it runs on all ranks. With `sends_parts` a
    `ModelCheckpoint` goes as far as `model.save`, where this rank sends its parts of the optimizer's state.
    """

    def replace(name: str, value: Any) -> None:
        undo.enter_context(patched(callback, name, value))

    if type(callback) in ONLY_WRITERS:
        return None
    if isinstance(callback, keras.callbacks.TensorBoard):
        replace("log_dir", undo.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
    elif isinstance(callback, keras.callbacks.CSVLogger):
        replace("filename", os.devnull)
    elif isinstance(callback, keras.callbacks.RemoteMonitor):
        replace("root", "kdist-of-another-rank:")  # not an address: Keras warns that it is not reachable
    elif isinstance(callback, keras.callbacks.BackupAndRestore):
        replace(SAVE_MODEL, lambda: None)
        replace(LOAD_MODEL, lambda: None)
        replace("delete_checkpoint", False)
    elif saves_as_keras_does(callback):
        replace(SAVE_MODEL, checkpoint_parts(callback) if sends_parts else checkpoint_decision(callback))
    return callback


def decide_together(callback: Any, engine: Engine, writer: int, undo: contextlib.ExitStack) -> None:
    """Makes a `ModelCheckpoint` save on all ranks when it does so on the one that writes: logs may differ.

    Args:
        callback: any callback; others are left as they are.
        engine: `Engine`, how the ranks communicate.
        writer: int, the rank that writes the file.
        undo: `ExitStack`, which undoes it.
    """
    if not saves_as_keras_does(callback):
        return
    decide = getattr(callback, SHOULD_SAVE)

    def decision(*args: Any) -> bool:
        """Returns the writer's. Collective: every rank must call this, in the same order."""
        return bool(engine.broadcast_object(bool(decide(*args)), root=writer))

    undo.enter_context(patched(callback, SHOULD_SAVE, decision))
