"""Trainings that a backup refuses, and those of which it warns."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import keras

from kdist.errors import CheckpointError
from kdist.keras_hooks.trainer import layers_of
from kdist.state.part import StatePart
from kdist.state.variables import FIX_OF_UNTRACKED, ModelState

logger = logging.getLogger("kdist")


def check_arguments(backup_dir: object, save_freq: object, asynchronous: object, memory_freq: object) -> None:
    """Raises `CheckpointError` if an argument of `BackupAndRestore` is invalid, or the directory is elsewhere."""
    if (
        not (isinstance(backup_dir, (str, os.PathLike)) and os.fspath(backup_dir))
        or not isinstance(asynchronous, bool)
        or not (save_freq == "epoch" or _is_count(save_freq))
        or not (memory_freq in ("auto", None) or _is_count(memory_freq))
    ):
        raise CheckpointError(
            f"An argument of BackupAndRestore is invalid. Received: backup_dir={backup_dir!r}, "
            f"save_freq={save_freq!r}, asynchronous={asynchronous!r}, memory_freq={memory_freq!r}. Expected a "
            "directory; 'epoch' or a number of steps above 0; True or False; and 'auto', None or a number of steps "
            "above 0. Fix: change it."
        )
    if "://" in str(backup_dir):
        raise CheckpointError(
            f"backup_dir is not on a file system. Received: backup_dir={str(backup_dir)!r}. Expected a path, as a "
            "checkpoint is a directory that is renamed when it is complete. Fix: mount the storage, or give a local "
            "path and copy the directory before and after the training."
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_built(model: keras.Model) -> None:
    """Raises `CheckpointError` if the first step would build layers, whose weights a resumed training loads before."""
    parts = [each for each in layers_of(model) if not isinstance(each, keras.Model)]
    makes_weights = [each for each in parts if type(each).build is not keras.layers.Layer.build]
    if not model.built and not all(each.built for each in makes_weights):
        raise CheckpointError(
            "BackupAndRestore needs a model that is built when fit begins: a resumed training loads its weights "
            f"then. Received: {type(model).__name__} {model.name!r} with layers that the first step "
            "would build. Expected all of its weights. Fix: begin the model with keras.Input(...), or call "
            "model.build(input_shape), or the model on a batch, before fit."
        )


def check_alone(backup_dirs: Sequence[str]) -> None:
    """Raises `CheckpointError` if a `fit` has several backups."""
    if len(backup_dirs) > 1:
        raise CheckpointError(
            f"Two BackupAndRestore are in one fit. Received: backup_dir {', '.join(map(repr, backup_dirs))}. "
            "Expected one, as a training resumes from one checkpoint. Fix: keep one; its save_freq says how often "
            "it saves, and memory_freq how often it copies."
        )


def warn_of_keras_backup(backup_dir: str) -> None:
    """Warns of a directory with a backup of Keras' own."""
    weights = Path(backup_dir, "latest.weights.h5")
    if weights.exists():
        logger.warning(
            "%s has a backup of Keras' own BackupAndRestore, which kdist cannot read: training starts from the "
            "beginning. Fix: model.load_weights(%r), and fit(initial_epoch=...). kdist.callbacks.BackupAndRestore "
            "resumes trainings of one process and of several.", backup_dir, str(weights),
        )  # fmt: skip


def warn_of_untracked(parts: Sequence[StatePart]) -> bool:
    """Warns of variables that are not saved, and returns whether there are some."""
    names = [name for part in parts if isinstance(part, ModelState) for name in part.untracked]
    if names:
        logger.warning(
            "this training cannot be resumed: variables that the model does not track are not saved. Received: an "
            "optimizer that updates %s. Fix: %s.", ", ".join(names), FIX_OF_UNTRACKED,
        )  # fmt: skip
    return bool(names)
