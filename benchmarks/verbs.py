"""What a call costs beside its steps: plain Keras in one process against kdist on 2 ranks.

    python benchmarks/verbs.py [--turns 3] [--only NAME ...] [--json FILE]

A small model, so that a call is what its method costs. Plain Keras and kdist take turns, a core for each process. Two
times of a call, after calls that are not counted: the median of the wall times, and the median of the CPU times of
Python's thread, which other processes on the machine lengthen less. Rows are medians over the turns. Both sides make as
many steps, and a process has as many rows in each; plain Keras' wall times over a dataset include its wait for
`tf.data`'s tuner at the end of an epoch, its CPU times do not. Alone on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launching import ONE_THREAD, run_well

BATCH, FEATURES, CLASSES = 64, 32, 10
LARGE = (5000, 8192)  # 164 MB of float32
MPIRUN = ["mpirun", "-np", "2", "--bind-to", "core"]
PINNED = ["taskset", "-c", "0"]
WARM = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--json", type=Path, help="write milliseconds to this file")
    parser.add_argument("--measure", choices=("plain", "kdist"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.only, options.json)
        return
    given = ["--only", *options.only] if options.only else []
    found: dict[str, dict[str, list[list[float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns):
            for side in ("plain", "kdist") if turn % 2 == 0 else ("kdist", "plain"):
                file = Path(folder, f"{side}{turn}.json")
                mpirun = [str(Path(sys.executable).parent / MPIRUN[0]), *MPIRUN[1:]]
                command = [*(mpirun if side == "kdist" else PINNED), sys.executable, __file__]
                run_well([*command, "--measure", side, "--json", str(file), *given], ONE_THREAD, 900)
                for name, times in json.loads(file.read_text()).items():
                    found.setdefault(name, {}).setdefault(side, []).append(times)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))


def measure(side: str, only: list[str] | None, file: Path) -> None:
    """Runs in each process; the chief writes the times of each method, `[wall, CPU]` in milliseconds."""
    import keras

    scope: Any = contextlib.nullcontext()
    is_chief, size = True, 1
    if side == "kdist":
        import kdist

        scope = kdist.scope(scale_lr=None)
    with scope:
        if side == "kdist":
            is_chief, size = kdist.is_chief(), kdist.size()
        calls = {name: call for name, call in methods(keras, size).items() if not only or name in only}
        found = {name: _times(make(), count) for name, (make, count) in calls.items()}
    if is_chief:
        file.write_text(json.dumps(found))


def methods(keras: Any, size: int) -> dict[str, tuple[Callable[[], Callable[[], Any]], int]]:
    """Returns, by name, a function that makes a call of a method in a job of a size, and how often it is called."""
    import numpy as np
    import tensorflow as tf

    def model(features: int = FEATURES) -> Any:
        layers = [keras.Input((features,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(CLASSES)]
        made = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(optimizer=keras.optimizers.SGD(0.01), loss=loss, metrics=["accuracy"])
        return made

    generator = np.random.default_rng(0)
    x = generator.random((size * 4 * BATCH, FEATURES), np.float32)
    y = generator.integers(0, CLASSES, len(x))
    rows, targets = x[:BATCH], y[:BATCH]

    def on(method: str, *args: Any, **kwargs: Any) -> Callable[[], Callable[[], Any]]:
        return lambda: functools.partial(getattr(model(), method), *args, **kwargs)

    def fit_large() -> Callable[[], Any]:
        made, large, classes = model(LARGE[1]), np.ones(LARGE, np.float32), np.zeros(LARGE[0], np.int64)
        return lambda: made.fit(large, classes, batch_size=BATCH, steps_per_epoch=2 * size, verbose=0)

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(BATCH)
    return {
        "fit, arrays": (on("fit", x, y, batch_size=BATCH, verbose=0), 20),
        "fit, a dataset": (on("fit", dataset, verbose=0), 20),
        "fit, a shuffled dataset": (on("fit", shuffled, verbose=0), 20),
        "fit, 164 MB of arrays": (fit_large, 6),
        "evaluate, arrays": (on("evaluate", x, y, batch_size=BATCH, verbose=0), 20),
        "predict, arrays": (on("predict", x, batch_size=BATCH, verbose=0), 20),
        "predict, one row": (on("predict", x[:1], verbose=0), 50),
        "train_on_batch": (on("train_on_batch", rows, targets), 300),
        "test_on_batch": (on("test_on_batch", rows, targets), 300),
        "predict_on_batch": (on("predict_on_batch", rows), 300),
    }


def _times(call: Callable[[], Any], count: int) -> tuple[float, float]:
    wall, cpu = [], []
    for _ in range(WARM):
        call()
    for _ in range(count):
        started, used = time.perf_counter(), time.thread_time()
        call()
        cpu.append(time.thread_time() - used)
        wall.append(time.perf_counter() - started)
    return 1e3 * statistics.median(wall), 1e3 * statistics.median(cpu)


def table(found: dict[str, dict[str, list[list[float]]]]) -> str:
    """Returns the Markdown table."""
    rows = [
        "| method | plain, ms | 2 ranks, ms | more, ms | ratio | plain, CPU ms | 2 ranks, CPU ms | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, sides in found.items():
        (wall, cpu), (our_wall, our_cpu) = (
            [statistics.median(times) for times in zip(*sides[side], strict=True)] for side in ("plain", "kdist")
        )
        rows.append(
            f"| {name} | {wall:.2f} | {our_wall:.2f} | {our_wall - wall:.2f} | {our_wall / wall:.2f} "
            f"| {cpu:.2f} | {our_cpu:.2f} | {our_cpu / cpu:.2f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
