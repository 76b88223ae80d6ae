"""Callbacks that write files: which rank writes, and how the others run the same callback without writing."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

import keras

NOTHING_ELSE = (
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
    *filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]),
)
"""Keras' callbacks that only write what others read, and decide nothing: the writer's is enough."""

MISSING = object()


def labels(callbacks: list[Any]) -> list[str]:
    """Returns what the ranks know a callback by: its class, and which one of its class it is."""
    names = [f"{type(each).__module__}.{type(each).__qualname__}" for each in callbacks]
    return [f"{name}#{names[:place].count(name)}" for place, name in enumerate(names)]


def silenced(callback: Any, undo: contextlib.ExitStack) -> Any | None:
    """Returns what a rank runs that is not to write: the callback, writing nowhere, or `None`.

    A class of the user's own may do more than write, evaluate say, which needs all ranks: it runs everywhere.

    Args:
        callback: `keras.callbacks.Callback`.
        undo: `contextlib.ExitStack`, at whose end the callback is as it was.
    """

    def replace(name: str, value: Any) -> None:
        before = vars(callback).get(name, MISSING)
        setattr(callback, name, value)
        undo.callback(lambda: vars(callback).pop(name, None) if before is MISSING else setattr(callback, name, before))

    if type(callback) in NOTHING_ELSE:
        return None
    if isinstance(callback, keras.callbacks.TensorBoard):
        replace("log_dir", undo.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
    elif isinstance(callback, keras.callbacks.CSVLogger):
        replace("filename", os.devnull)
    elif isinstance(callback, keras.callbacks.RemoteMonitor):
        replace("root", "kdist-of-another-rank:")  # no address: Keras warns, as for any that is not reached
    elif isinstance(callback, keras.callbacks.BackupAndRestore):
        replace("_save_model", lambda: None)
        replace("_load_model", lambda: None)
        replace("delete_checkpoint", False)
    elif _saves_as_keras_does(callback):
        # The decision, which sets `best`, and not the file.
        def decide(epoch: int, batch: int | None, logs: dict[str, Any] | None) -> None:
            callback._should_save_model(epoch, batch, logs, callback._get_file_path(epoch, batch, logs))

        replace("_save_model", decide)
    return callback


def _saves_as_keras_does(callback: Any) -> bool:
    checkpoint = keras.callbacks.ModelCheckpoint
    return isinstance(callback, checkpoint) and type(callback)._save_model is checkpoint._save_model
