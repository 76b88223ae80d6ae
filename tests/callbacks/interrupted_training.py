"""A training that comes to a bad end: `python -m tests.callbacks.interrupted_training FOLDER [END [RANK SECONDS]]`.

The end is `kill`, of a rank so many seconds after its second step, or the writer that finds the chief's disk full after
the second epoch. Without one it goes on from what it finds, trains once more without an interruption, and compares.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist
from tests.callbacks.cases_resume import inputs, network, others
from tests.callbacks.full_disk import fill_disk

EPOCHS = 12
KILL = "kill"
WRITERS = ("CSVLogger", "ModelCheckpoint", "BackupAndRestore")


class KillAfter(keras.callbacks.Callback):
    """Kills this process so many seconds after a step, when one has been saved, wherever it is then."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds: float | None = seconds

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch and self._seconds is not None:
            threading.Timer(self._seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            self._seconds = None


class FillDisk(keras.callbacks.Callback):
    """Lets the chief's disk be full from the end of the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self._epochs = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epochs += 1
        if self._epochs == 2 and kdist.is_chief():
            fill_disk()


def train(folder: str, end: str = "", rank: str = "", seconds: str = "") -> list[Any]:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    writers = (
        keras.callbacks.CSVLogger(os.path.join(folder, "log.csv"), append=True),
        keras.callbacks.ModelCheckpoint(os.path.join(folder, "last.keras")),
        kdist.callbacks.BackupAndRestore(folder, save_freq=1, delete_checkpoint=False),
    )
    callbacks = others()[1:]
    if end == KILL and int(rank) == kdist.rank():
        callbacks.append(KillAfter(float(seconds)))
    for name, writer in zip(WRITERS, writers, strict=True):
        callbacks += [FillDisk(), writer] if name == end else [writer]
    os.makedirs(folder, exist_ok=True)
    with kdist.scope():
        model = network()
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae", keras.metrics.R2Score()])
        history = model.fit(**inputs("tf_data"), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    weights = [np.asarray(v).tolist() for v in [*model.weights, *model.optimizer.variables]]
    return [weights, history.history]


def main() -> None:
    tf.config.experimental.enable_op_determinism()
    folder, *end = sys.argv[1:]
    found = train(folder, *end)
    if end:
        print(f"rank {kdist.rank()} came to its end", flush=True)
        return
    expected = train(os.path.join(folder, "never"))
    print(f"rank {kdist.rank()}: {'equal' if found == expected else 'different'}", flush=True)


if __name__ == "__main__":
    main()
