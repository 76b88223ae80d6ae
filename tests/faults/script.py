"""A small job that breaks on one rank: what the campaign starts. `python -m tests.faults.script KIND MOMENT RANK`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import kdist

START = 20.0  # seconds in which both ranks must have entered the scope
STALL = 8.0  # seconds; long enough for ranks that trace one after the other on few cores


def main() -> None:
    """Trains, validates, saves and ends; at one moment one rank breaks."""
    kind, moment, rank = sys.argv[1:]
    is_mine = kdist.cluster_info().rank == int(rank)

    def now(here: str) -> None:
        if is_mine and here == moment:
            break_down(kind)

    now("start")
    import keras
    import numpy as np

    class Moments(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            now({0: "first step", 5: "epoch"}.get(self.steps, ""))
            self.steps += 1

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            now("validation")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            now("save")

    x, y = np.ones((64, 3), "float32"), np.ones((64, 1), "float32")
    strategy = kdist.AllReduce(start_timeout=START)
    with tempfile.TemporaryDirectory() as folder, kdist.scope(strategy, stall_timeout=STALL):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        now("build")
        model.compile("sgd", "mse")
        checkpoint = keras.callbacks.ModelCheckpoint(str(Path(folder, "{epoch}.weights.h5")), save_weights_only=True)
        model.fit(
            *(x, y),
            validation_data=(x[:16], y[:16]),
            batch_size=4,
            epochs=2,
            verbose=0,
            callbacks=[checkpoint, Moments()],
        )
    now("end")
    atexit.register(now, "exit")


def break_down(kind: str) -> None:
    """Does what ends, or stops, this process."""
    if kind == "raise":
        raise ValueError("broken on purpose")
    if kind.startswith("sys.exit"):
        sys.exit(int(kind.removeprefix("sys.exit ")))
    if kind.startswith("os._exit"):
        os._exit(int(kind.removeprefix("os._exit ")))
    os.kill(os.getpid(), getattr(signal, kind))
    time.sleep(60)  # a stopped process that is continued has lost its job by then


if __name__ == "__main__":
    main()
