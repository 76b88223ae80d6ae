"""Parameter servers: kdist's `fit` against that of tf_keras (legacy Keras), on the same cluster, in turns.

    pip install tf_keras
    python benchmarks/parameter_server.py [--models mlp cnn] [--workers 1] [--repeats 5] [--json FILE]

Both sides train in one process, the chief, on the same workers and ps; a ratio is taken within a turn, so that a busy
machine slows both. A turn is one call of `fit`, its time that of its fastest epoch but the first. tf_keras reads a
dataset on each worker, without an epoch's end; kdist hands out each sample once. Above 1, kdist is faster.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from epoch_times import fastest_epoch
from machine import machine
from models import MODELS, compile_model, random_data

BATCH = 64
STEPS = {"mlp": 256, "cnn": 32}
EPOCHS = 4
PER_EXECUTION = (1, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(STEPS), default=["mlp", "cnn"])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each comparison")
    parser.add_argument("--json", type=Path, help="write every turn's ratios to this file")
    parser.add_argument("--task", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        task(arguments)
        return
    models = ["--models", *arguments.models]
    found = on_cluster(__file__, arguments.workers, ["--repeats", str(arguments.repeats), *models])
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found, arguments.workers))


def on_cluster(script: str, workers: int, arguments: Sequence[str]) -> Any:
    """Runs a script with `--task --json FILE` as each task of a cluster with one ps; returns what its chief wrote."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        line = [sys.executable, "-m", "kdist.cli.main", "run", "--strategy", "parameter_server", "--ps", "1"]
        line += ["-np", str(2 + workers), script, "--task", "--json", str(report), *arguments]
        quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        subprocess.run(line, env={**os.environ, **quiet}, check=True, stdout=sys.stderr)
        return json.loads(report.read_text())


def task(arguments: argparse.Namespace) -> None:
    """What each task of the cluster runs; only the chief comes past the scope's first line."""
    import kdist

    found: dict[str, dict[str, list[float]]] = {}
    with kdist.scope() as strategy:
        for name in arguments.models:
            for per_execution in PER_EXECUTION:
                legacy = legacy_trainer(name, per_execution, strategy)
                ours = trainer(name, per_execution)
                seconds = [turn(legacy, ours, number) for number in range(arguments.repeats)]
                found[f"{name} {per_execution}"] = {
                    "ratio": [theirs / mine for theirs, mine in seconds],
                    "ms a step": [1000 * mine / STEPS[name] for _, mine in seconds],
                }
                print(name, per_execution, found[f"{name} {per_execution}"], file=sys.stderr, flush=True)
    arguments.json.write_text(json.dumps(found))


def turn(legacy: Callable[[], float], ours: Callable[[], float], number: int) -> tuple[float, float]:
    """Returns both sides' seconds; each second turn takes the other order."""
    if number % 2:
        return legacy(), ours()
    mine = ours()
    return legacy(), mine


def arrays(name: str) -> tuple[Any, Any]:
    """Returns an epoch of random data."""
    return random_data(name, BATCH * STEPS[name])


def network(keras: Any, name: str, per_execution: int) -> Any:
    """Returns a compiled network, in Keras 3 or tf_keras."""
    model = MODELS[name].build(keras)
    compile_model(keras, model, steps_per_execution=per_execution)
    return model


def timed(keras: Any, fit: Callable[..., Any]) -> Callable[[], float]:
    """Returns a function that calls `fit` and returns the seconds of its fastest epoch but the first."""
    run = functools.partial(fastest_epoch, keras, functools.partial(fit, epochs=EPOCHS, verbose=0))
    run()  # traces
    return run


def trainer(name: str, per_execution: int) -> Callable[[], float]:
    """Returns one turn of kdist's."""
    import keras

    x, y = arrays(name)
    model = network(keras, name, per_execution)
    return timed(keras, functools.partial(model.fit, x, y, batch_size=BATCH))


def legacy_trainer(name: str, per_execution: int, strategy: Any) -> Callable[[], float]:
    """Returns one turn of tf_keras'."""
    import tensorflow as tf
    import tf_keras  # type: ignore[import-untyped]

    x, y = arrays(name)
    with strategy.scope():
        model = network(tf_keras, name, per_execution)

    def dataset(context: Any = None) -> Any:
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat()
        return data.batch(BATCH).prefetch(tf.data.AUTOTUNE)

    creator = tf_keras.utils.experimental.DatasetCreator(dataset)
    return timed(tf_keras, functools.partial(model.fit, creator, steps_per_epoch=STEPS[name]))


def table(found: dict[str, dict[str, list[float]]], workers: int) -> str:
    """Returns the Markdown table of medians and quartiles."""
    rows = [
        "| model | steps_per_execution | tf_keras' time / kdist's | quartiles | kdist, ms a step |",
        "|---|---|---|---|---|",
    ]
    for key, values in found.items():
        name, per_execution = key.split()
        ratios = values["ratio"]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows.append(
            f"| {name} | {per_execution} | {statistics.median(ratios):.2f} | {low:.2f} to {high:.2f} | "
            f"{statistics.median(values['ms a step']):.2f} |"
        )
    where = machine("tensorflow", "keras", "tf_keras")
    return "\n".join([f"{workers} worker(s), 1 ps, batch {BATCH}, {where}.", "", *rows])


if __name__ == "__main__":
    main()
