"""A small model, many steps; prints what this process holds in between. `python -m tests.endurance.script STEPS`."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import kdist

SAMPLES = 20
STEPS_PER_EPOCH = 50


def held() -> dict[str, int]:
    """Returns this process's memory in KB, its open files, and its threads."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    files = len(os.listdir("/proc/self/fd"))
    return {"memory": int(status["VmRSS"].split()[0]), "files": files, "threads": int(status["Threads"])}


class Sampler(keras.callbacks.Callback):
    """Looks some times, evenly over all steps."""

    def __init__(self, steps: int):
        super().__init__()
        self.every = steps // SAMPLES
        self.steps = 0
        self.found: list[dict[str, int]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            self.found.append(held())


def main() -> None:
    """Trains, validating after each epoch."""
    steps, rank = int(sys.argv[1]), kdist.rank()
    x = np.random.default_rng(0).normal(size=(STEPS_PER_EPOCH * 8 * kdist.size(), 16)).astype("float32")
    sampler = Sampler(steps)
    with kdist.scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        model.fit(
            *(x, x.sum(1)),
            validation_data=(x[:64], x[:64].sum(1)),
            batch_size=8,
            epochs=steps // STEPS_PER_EPOCH,
            verbose=0,
            callbacks=[sampler],
        )
    print(f"held {rank} {json.dumps(sampler.found)}", flush=True)


if __name__ == "__main__":
    main()
