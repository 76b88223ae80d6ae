"""A training that was interrupted goes on where it was."""

from __future__ import annotations

import os

from kdist.errors import CheckpointError
from kdist.training.backup import Backup


class BackupAndRestore(Backup):
    """Keeps what an interrupted training needs to go on where it was, in the middle of an epoch too.

    The script is started again as it was. Kept are weights, optimizers, the place in the data, random states (seed
    generators, Python, NumPy), metrics in the middle of an epoch, `History`, and what Keras' callbacks remember
    (`EarlyStopping`, `ReduceLROnPlateau`, `ModelCheckpoint`, `SwapEMAWeights`, `TensorBoard`). A checkpoint is a
    directory that is renamed when it is whole; the one before it is kept, and taken if the newest cannot be read.

    In `kdist.scope()` of several ranks the chief writes and reads, and the others need not see its disk. Arrays,
    `PyDataset` and seeded `tf.data` go on exactly where they were: with `tf.config.experimental.enable_op_determinism`
    the weights at the end are, bit for bit, those of a training that was never interrupted. Another number of ranks may
    go on: batch, learning rate and place follow it. In one process, where the data is Keras' own, the batches that were
    taken are drawn again and passed over. A generator is read again from its beginning. The log says which.

    Keras' own `BackupAndRestore`, given to `fit` in a scope of several ranks, does the same.

    Args:
        backup_dir: str or path, a directory of this training's own. While another process uses it, this one waits,
            for half a minute.
        save_freq: `"epoch"`, or an int: after how many steps of the job to save.
        double_checkpoint: bool, as in Keras; the one before the newest is always kept.
        delete_checkpoint: bool, whether the checkpoints are deleted when `fit` has ended.

    Raises:
        ScopeError: when training begins, if it is to save between two steps of parameter servers' workers.
        CheckpointError: if the arguments are no good; when training begins, if there are checkpoints and none can be
            read, or they are another model's; when one cannot be written.

    Example:
    ```python
    model.fit(x, y, epochs=10, callbacks=[kdist.callbacks.BackupAndRestore("backup", save_freq=500)])
    ```
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = True,
        delete_checkpoint: bool = True,
    ) -> None:
        if not os.fspath(backup_dir) or not (save_freq == "epoch" or (isinstance(save_freq, int) and save_freq > 0)):
            raise CheckpointError(
                f"BackupAndRestore cannot work like this. Received: backup_dir={backup_dir!r}, "
                f"save_freq={save_freq!r}. Expected a directory, and 'epoch' or a number of steps of at least 1. Fix: "
                "give these."
            )
        super().__init__(os.fspath(backup_dir), save_freq, delete_checkpoint)
