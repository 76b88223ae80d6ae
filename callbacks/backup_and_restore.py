"""Backup of a training, and resume after an interruption."""

from __future__ import annotations

import os
from typing import Literal

from kdist.checkpoint.backup import Backup
from kdist.errors import CheckpointError


class BackupAndRestore(Backup):
    """Saves the state of a training, and resumes an interrupted training there, within an epoch too.

    The same script is started again. A checkpoint contains weights, optimizers, the position in the data, random states
    (seed generators, Python, NumPy), metrics within an epoch, `History`, and the state of Keras' callbacks
    (`EarlyStopping`, `ReduceLROnPlateau`, `ModelCheckpoint`, `SwapEMAWeights`, `TensorBoard`). It is a directory that
    is renamed when it is complete; the previous one is kept, and used if the newest cannot be read.

    In `kdist.scope()` of several ranks the chief writes and reads; the others need no access to its disk. Arrays,
    `PyDataset` and `tf.data` resume exactly, with or without seeds of their shuffles: with
    `tf.config.experimental.enable_op_determinism` the final weights are equal bit for bit to those of an uninterrupted
    training. Another number of ranks may resume: batch, learning rate and position are converted. In one process, where
    Keras iterates the data, the batches of earlier steps are drawn again and skipped. A generator is read from its
    beginning. The log describes what is done.

    It runs on all ranks, and may be given on one of them only.

    Keras' own `BackupAndRestore`, given to `fit` in a scope of several ranks, does the same.

    With `asynchronous=True` a step waits until the state has been copied, not until it is written; state of which each
    rank has a part is written before training goes on. With `memory_freq`, each host also keeps the newest two
    checkpoints in its memory (`/dev/shm`), and `kdist run --restarts` resumes from the newest of all, on the hosts that
    are left. So few steps are lost, the chief's host may be lost with its disk, and the disk is written seldom.

    Args:
        backup_dir: str or path, a directory for this training only. While another process uses it, this one waits up
            to 30 seconds.
        save_freq: `"epoch"`, or an int: the steps of the job between two saves, which do not grow with its ranks.
        double_checkpoint: bool, as in Keras; the previous checkpoint is always kept.
        delete_checkpoint: bool, whether the checkpoints are deleted at the end of `fit`.
        asynchronous: bool, whether training goes on while the chief writes. It takes memory for a copy that is being
            written and one that waits; where saves come faster than they are written, the newest one waits, and those
            between are left out.
        memory_freq: int, the steps between two copies in the memory of each host; `"auto"`, so that they take 1 % of
            the time at most; or `None` for none.

    Raises:
        ScopeError: when training begins, if workers of parameter servers would save between two steps.
        CheckpointError: if an argument is invalid; when training begins, if no checkpoint can be read, or it is another
            model's, or if one process trains a model that is not built; when one cannot be written.

    Example:
    ```python
    model.fit(x, y, epochs=10, callbacks=[kdist.callbacks.BackupAndRestore("backup", save_freq=500)])
    ```
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Literal["epoch"] | int = "epoch",
        double_checkpoint: bool = True,
        delete_checkpoint: bool = True,
        asynchronous: bool = False,
        memory_freq: int | Literal["auto"] | None = None,
    ) -> None:
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
        super().__init__(os.fspath(backup_dir), save_freq, delete_checkpoint, asynchronous, memory_freq)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value > 0
