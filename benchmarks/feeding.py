"""Parameter servers: what feeding a worker costs, by the size of the rows and by how the data is given.

    python benchmarks/feeding.py [--repeats 5] [--json FILE]

The model looks at 16 numbers of each row, so that a step is little but its data. Arrays are on the worker, and row
numbers are sent; the batches of a `tf.data.Dataset` are read on the chief and sent. One worker, one ps; in turns, each
the fastest epoch but the first of one `fit`. Milliseconds a step, and ratios to rows of 64 numbers in arrays.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

from epoch_times import fastest_epoch
from parameter_server import on_cluster

BATCH, STEPS, EPOCHS = 64, 64, 3
WIDTHS = (64, 4096, 32768)  # numbers in a row, 4 bytes each
PER_EXECUTION = (1, 16)
WAYS = ("arrays", "tf.data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    parser.add_argument("--json", type=Path, help="write every turn's milliseconds to this file")
    parser.add_argument("--task", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        task(arguments.repeats, arguments.json)
        return
    found = on_cluster(__file__, 1, ["--repeats", str(arguments.repeats)])
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))


def task(repeats: int, report: Path) -> None:
    """What each task of the cluster runs; only the chief comes past the scope's first line."""
    import kdist

    with kdist.scope():
        turns = {
            f"{way} {width} {many}": trainer(way, width, many)
            for width in WIDTHS
            for way in WAYS
            for many in PER_EXECUTION
        }
        found: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(repeats):
            for name, run in turns.items():
                found[name].append(1000 * run() / STEPS)
    report.write_text(json.dumps(found))


def trainer(way: str, width: int, per_execution: int) -> Callable[[], float]:
    """Returns a function that trains and returns the seconds of an epoch."""
    import keras
    import numpy as np
    import tensorflow as tf

    x, y = np.ones((BATCH * STEPS, width), "float32"), np.ones((BATCH * STEPS, 1), "float32")
    model = keras.Sequential([keras.Input((width,)), keras.layers.Lambda(lambda rows: rows[:, :16])])
    model.add(keras.layers.Dense(1))
    model.compile("sgd", "mse", steps_per_execution=per_execution)
    dataset = tf.data.Dataset.from_tensor_slices((x[:BATCH], y[:BATCH])).repeat(STEPS).batch(BATCH)
    given = (
        functools.partial(model.fit, x, y, batch_size=BATCH)
        if way == "arrays"
        else functools.partial(model.fit, dataset)
    )
    run = functools.partial(fastest_epoch, keras, functools.partial(given, epochs=EPOCHS, verbose=0))
    run()  # traces, and sends the arrays
    return run


def table(found: dict[str, list[float]]) -> str:
    """Returns the Markdown table of medians."""
    least = statistics.median(found[f"arrays {WIDTHS[0]} 1"])
    head = "".join(f" {way}, {many} step(s) an execution |" for way in WAYS for many in PER_EXECUTION)
    rows = [f"| a batch |{head}", "|---" * (1 + len(WAYS) * len(PER_EXECUTION)) + "|"]
    for width in WIDTHS:
        medians = [statistics.median(found[f"{way} {width} {many}"]) for way in WAYS for many in PER_EXECUTION]
        cells = [f" {ms:.2f} ms ({ms / least:.2f}) |" for ms in medians]
        rows.append(f"| {BATCH * width * 4 / 1024:.0f} KB |{''.join(cells)}")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
