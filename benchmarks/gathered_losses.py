"""What a step costs more whose loss or metric is computed from the outputs of all ranks, by the number of classes.

    python benchmarks/gathered_losses.py [--classes 10 1000 50000] [--turns 5] [--out FILE]

Two ranks over MPI, a core each, 64 rows a rank. A `Dense` classifier is trained with a loss of `keras.losses`, with
the same loss as a function of the user's, which kdist gathers, and with that and a metric of the user's. They take
turns in one job, in changing order; a turn's ratio is of the medians of the times between two batch ends.
Alone on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from launching import ONE_THREAD, run_well
from machine import machine
from quartiles import quartiles

BATCH, FEATURES, STEPS = 64, 256, 60
PACKAGES = ("tensorflow", "keras", "mpi4py", "numpy")
KINDS = ("keras.losses", "own loss", "own loss and metric")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 1000, 50000])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where the table goes; shown as well")
    parser.add_argument("--ranks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks:
        measure(options)
        return
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "-np", "2", "--bind-to", "core"]
    given = [*("--classes", *map(str, options.classes)), "--turns", str(options.turns)]
    given += ["--out", str(options.out.resolve())] if options.out else []
    run_well([*mpirun, sys.executable, __file__, "--ranks", *given], ONE_THREAD, 1800)


def measure(options: Any) -> None:
    """Runs on each rank; rank 0 prints the table."""
    import keras

    import kdist

    lines = [
        "| classes | bytes a rank sends | own loss | quartiles | own loss and metric | quartiles |",
        "|---:|---:|---:|---|---:|---|",
    ]
    with kdist.scope(scale_lr=None):
        for classes in options.classes:
            ratios: dict[str, list[float]] = {kind: [] for kind in KINDS[1:]}
            for turn in range(options.turns):
                seconds = {kind: step_time(keras, classes, kind) for kind in sorted(KINDS, reverse=bool(turn % 2))}
                for kind, found in ratios.items():
                    found.append(seconds[kind] / seconds[KINDS[0]])
            cells = [f"{q[1]:.2f} | {q[0]:.2f} to {q[2]:.2f}" for q in map(quartiles, ratios.values())]
            lines.append(f"| {classes:,} | {BATCH * classes * 4:,} | {' | '.join(cells)} |")
    if kdist.is_chief():
        text = "\n".join([machine(*PACKAGES), "", *lines, ""])
        print(text)
        if options.out:
            options.out.write_text(f"# What gathered losses cost\n\n`python benchmarks/gathered_losses.py`. {text}")


def step_time(keras: Any, classes: int, kind: str) -> float:
    """Returns the median of the seconds between two batch ends of one epoch, without the first ten."""
    import numpy as np

    function = keras.losses.sparse_categorical_crossentropy

    class Times(keras.callbacks.Callback):  # type: ignore[misc]
        reads_state_between_steps = False

        def on_train_begin(self, logs: Any = None) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

    generator = np.random.default_rng(0)
    x = generator.normal(size=(BATCH * STEPS * 2, FEATURES)).astype("float32")
    y = generator.integers(classes, size=len(x))
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(classes, activation="softmax")])
    metric = keras.metrics.sparse_categorical_accuracy
    model.compile(
        keras.optimizers.SGD(0.01),
        keras.losses.SparseCategoricalCrossentropy() if kind == KINDS[0] else lambda t, p: function(t, p),
        metrics=["sparse_categorical_accuracy" if kind != KINDS[2] else lambda t, p: metric(t, p)],
    )
    times = Times()
    model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=[times])
    return statistics.median(np.diff(times.ends)[10:])


if __name__ == "__main__":
    os.environ.setdefault("KDIST_LOG", "warning")
    main()
