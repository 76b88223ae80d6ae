"""What a step takes with state in parts, against plain all-reduce: `shard_embeddings`, and `shard="optimizer"`.

    python benchmarks/state_in_parts.py [--models table mlp ...] [--turns 5] [--out FILE]

Two ranks over MPI, a core each. `table` is an embedding table of 100 MiB whose ids follow Zipf's law, with Adam; the
others are the models of models.py, with SGD with momentum as in compare.py and with Adam. Both ways train a model of
their own in one job, in turns of changing order; a turn's ratio is of the medians of the times between two batch ends.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launching import ONE_THREAD, run_well
from machine import machine
from models import MODELS, compile_model, random_data
from quartiles import quartiles

ROWS, WIDTH, LENGTH, BATCH = 409_600, 64, 32, 64
STEPS = 24
PACKAGES = ("tensorflow", "keras", "mpi4py", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["table", *MODELS], choices=["table", *MODELS])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where the table goes; shown as well")
    parser.add_argument("--ranks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks:
        measure(options)
        return
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "-np", "2", "--bind-to", "core"]
    given = ["--models", *options.models, "--turns", str(options.turns)]
    given += ["--out", str(options.out.resolve())] if options.out else []
    run_well([*mpirun, sys.executable, __file__, "--ranks", *given], ONE_THREAD, 3000)


def measure(options: Any) -> None:
    """Runs on each rank; rank 0 writes the table."""
    import keras

    import kdist

    lines = [
        "| model | optimizer | in parts | all-reduce, ms a step | ratio | quartiles |",
        "|---|---|---|---:|---:|---|",
    ]
    for name, optimizer in [(model, each) for model in options.models for each in optimizers(model)]:
        parts: dict[str, Any] = {"shard_embeddings": 1e6} if name == "table" else {"shard": "optimizer"}
        trained = {True: training(keras, name, optimizer, parts), False: training(keras, name, optimizer, {})}
        ratios, plain = [], []
        for turn in range(-1, options.turns):  # the first one traces
            seconds = {in_parts: trained[in_parts]() for in_parts in sorted(trained, reverse=bool(turn % 2))}
            if turn >= 0:
                ratios.append(seconds[True] / seconds[False])
                plain.append(1e3 * seconds[False])
        low, middle, high = quartiles(ratios)
        (what,) = parts
        lines.append(
            f"| {name} | {optimizer} | `{what}` | {statistics.median(plain):.1f} | {middle:.2f} "
            f"| {low:.2f} to {high:.2f} |"
        )
    if kdist.is_chief():
        text = "\n".join([machine(*PACKAGES), "", *lines, ""])
        print(text)
        if options.out:
            options.out.write_text(f"# Steps with state in parts\n\n`python benchmarks/state_in_parts.py`. {text}")


def optimizers(name: str) -> list[str]:
    """Returns the optimizers that a model is trained with."""
    return ["adam"] if name == "table" else ["sgd", "adam"]


def training(keras: Any, name: str, optimizer: str, parts: dict[str, Any]) -> Callable[[], float]:
    """Returns a function that trains a model for some steps, and returns the median time of a step."""
    import numpy as np

    import kdist

    class Times(keras.callbacks.Callback):  # type: ignore[misc]
        reads_state_between_steps = False

        def on_train_begin(self, logs: Any = None) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

    with kdist.scope(kdist.AllReduce(**parts), scale_lr=None):
        if name == "table":
            table = keras.layers.Embedding(ROWS, WIDTH)
            layers = [table, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(10)]
            model = keras.Sequential([keras.Input((LENGTH,), dtype="int64"), *layers])
            batch = BATCH
            x = np.minimum(np.random.default_rng(0).zipf(1.2, (2 * STEPS * batch, LENGTH)), ROWS) - 1
            y = np.random.default_rng(1).integers(10, size=len(x))
        else:
            model, batch = MODELS[name].build(keras), MODELS[name].batch
            x, y = random_data(name, 2 * STEPS * batch)
        if optimizer == "sgd":
            compile_model(keras, model)
        else:
            model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def train() -> float:
        times = Times()
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, callbacks=[times])
        return statistics.median(np.diff(times.ends)[4:])

    return train


if __name__ == "__main__":
    os.environ.setdefault("KDIST_LOG", "warning")
    main()
