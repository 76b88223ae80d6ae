"""Trainings that other numbers of ranks take up, on one global batch: `python -m tests.restarts.resized FOLDER START`.

The first start trains without an interruption as well. Each start but the last ends in the middle of an epoch, after
a step that is not saved.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist

RANKS = (3, 2, 3)  # of each start
KINDS = ("arrays", "tf_data", "py_dataset", "generator")
BATCH, ROWS, EPOCHS = 7, 60, 3  # no rank's share of a batch is as large as another's, and the last batch is smaller
TOLERANCE = 1e-9  # of float64
SETTINGS: Mapping[str, Any] = {"save_freq": 2}
ENDS = ((0, 4), (1, 2))  # of the first starts: epoch and step; every second step is saved


class Interrupted(Exception):
    """Stands for the end of the process."""


class InterruptAt(keras.callbacks.Callback):
    """Ends `fit` on all ranks.

    Args:
        epoch: int, from 0.
        batch: int, the step after which it ends.
    """

    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self._place, self._epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Stores the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Raises in the right step."""
        if (self._epoch, batch) == self._place:
            raise Interrupted


class Batches(keras.utils.PyDataset):
    """Batches that Keras shuffles."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self._x, self._y = x, y

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> Any:
        return tuple(each[index * BATCH : (index + 1) * BATCH] for each in (self._x, self._y))


def stream(x: Any, y: Any) -> Iterator[Any]:
    """Yields batches for ever, the same in each start."""
    generator = np.random.default_rng(0)
    while True:
        chosen = generator.integers(ROWS, size=BATCH)
        yield x[chosen], y[chosen]


def inputs(kind: str) -> dict[str, Any]:
    """Returns the arguments of `fit` that feed it."""
    generator = np.random.default_rng(5)
    x = generator.normal(size=(ROWS, 4))
    y = x @ generator.normal(size=(4, 2))
    if kind == "tf_data":
        return {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(40, seed=7).batch(BATCH)}
    if kind == "py_dataset":
        return {"x": Batches(x, y), "shuffle": True}
    if kind == "generator":
        return {"x": stream(x, y), "steps_per_epoch": -(-ROWS // BATCH)}
    return {"x": x, "y": y, "batch_size": BATCH}


def train(kind: str, folder: Path, callbacks: list[Any], settings: Mapping[str, Any] = SETTINGS) -> dict[str, Any]:
    """Trains as a script does from its first line; returns history, weights and the optimizer's state, by name.

    Args:
        kind: str, one of `KINDS`.
        folder: path, of the backup.
        callbacks: list of callbacks, before the backup.
        settings: mapping, other arguments of the backup.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with kdist.scope(scale_batch=False):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh")])
        model.add(keras.layers.BatchNormalization(synchronized=True))
        model.add(keras.layers.Dense(2))
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae", keras.metrics.R2Score()])
        backup = kdist.callbacks.BackupAndRestore(folder, **settings)
        history = model.fit(**inputs(kind), epochs=EPOCHS, verbose=0, callbacks=[*callbacks, backup])
    state = [*model.weights, *model.optimizer.variables]
    return {
        **{f"log {name}": np.asarray(values) for name, values in history.history.items()},
        **{f"state {number}": np.asarray(each) for number, each in enumerate(state)},
    }


def main() -> None:
    """Takes all trainings up, and interrupts them unless this is the last start."""
    folder, start = Path(sys.argv[1]), int(sys.argv[2])
    keras.backend.set_floatx("float64")
    for kind in KINDS:
        if start == 0:
            keep(folder / f"{kind}-whole.npz", train(kind, folder / f"{kind}-unused", []))
        if start < len(ENDS):
            try:
                train(kind, folder / kind, [InterruptAt(*ENDS[start])])
            except Interrupted:
                continue
            raise AssertionError(f"{kind} came to its end")
        keep(folder / f"{kind}-resized.npz", train(kind, folder / kind, []))


def keep(path: Path, result: dict[str, Any]) -> None:
    """Writes a result, on the chief."""
    if kdist.is_chief():
        np.savez(path, **result)


def difference(folder: Path, kind: str) -> float:
    """Returns the largest difference of any number from that of the training without an interruption."""
    with np.load(folder / f"{kind}-resized.npz") as mine, np.load(folder / f"{kind}-whole.npz") as whole:
        assert set(mine.files) == set(whole.files)
        return max(float(np.max(np.abs(mine[name] - whole[name]), initial=0.0)) for name in whole.files)


if __name__ == "__main__":
    main()
