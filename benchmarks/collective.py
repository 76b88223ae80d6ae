"""TensorFlow's collective ops: kdist's `fit` against MultiWorkerMirroredStrategy on tf_keras (legacy Keras), in turns.

    pip install tf_keras
    python benchmarks/collective.py [--turns 5] [--steps 8] [--workers 2] [--json FILE]

An MLP of 22 million parameters (88 MB of gradients), batch 64, SGD with momentum, one thread a worker. Both clusters
are started once and stay; they train in turns, so that a busy machine slows both: a turn is one `fit`, its time that of
the faster of two epochs of so many steps. A ratio is taken within a turn; above 1, kdist is faster. Keras 3 itself does
not train under MultiWorkerMirroredStrategy.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kdist.launch.local_cluster import configurations

BATCH = 64
SIDES = ("kdist", "MultiWorkerMirroredStrategy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every turn's seconds a step to this file")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        work(arguments.side, arguments.steps)
        return
    seconds = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(seconds, indent=2) + "\n")
    print(table(seconds, arguments.workers))


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Returns each side's seconds a step, one number a turn."""
    clusters: dict[str, list[subprocess.Popen[str]]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the workers are ended then, too
    try:
        for side in SIDES:
            clusters[side] = [start(side, config, arguments.steps) for config in configurations(arguments.workers)]
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for turn in range(arguments.turns + 1):
            for side in SIDES if turn % 2 else reversed(SIDES):
                slowest = max(answers(clusters[side]))
                if turn:  # the first one traces
                    seconds[side].append(slowest / arguments.steps)
        return seconds
    finally:
        for worker in [each for cluster in clusters.values() for each in cluster]:
            worker.kill()
            worker.wait()


def start(side: str, config: str, steps: int) -> subprocess.Popen[str]:
    """Starts one worker of a side's cluster; it trains when it is told to, and answers with the time that it took."""
    quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, __file__, "--side", side, "--steps", str(steps)],
        env={**os.environ, **quiet, **threads, "TF_CONFIG": config},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def answers(cluster: list[subprocess.Popen[str]]) -> list[float]:
    """Lets a cluster train for a turn; returns each worker's seconds."""
    for worker in cluster:
        print("train", file=worker.stdin, flush=True)
    return [
        next(float(line.split()[1]) for line in worker.stdout or () if line.startswith("took ")) for worker in cluster
    ]


def work(side: str, steps: int) -> None:
    """What each worker runs."""
    import numpy as np

    x = np.random.default_rng(0).normal(size=(2 * BATCH * steps, 784)).astype("float32")
    y = np.zeros(len(x), "int32")
    if side == "kdist":
        import kdist

        with kdist.scope(scale_lr=None):
            import keras as library

            model = mlp(library)
        data: dict[str, Any] = {"x": x[: len(x) // 2 * kdist.size()], "y": y[: len(y) // 2 * kdist.size()]}
        data["batch_size"] = BATCH
    else:
        import tensorflow as tf
        import tf_keras as library

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        size = strategy.num_replicas_in_sync
        with strategy.scope():
            model = mlp(library)
        rows = len(x) // 2 * size
        data = {"x": tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows])).batch(BATCH * size)}

    class Clock(library.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.took: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.started = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.took.append(time.perf_counter() - self.started)

    for _ in iter(sys.stdin.readline, ""):
        clock = Clock()
        model.fit(**data, epochs=2, shuffle=False, verbose=0, callbacks=[clock])
        print("took", min(clock.took), flush=True)


def mlp(keras: Any) -> Any:
    """Returns an MLP of 22 million parameters."""
    layers = [keras.layers.Dense(width, activation="relu") for width in (4096, 4096, 512)]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    model.build((None, 784))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    return model


def table(seconds: dict[str, list[float]], workers: int) -> str:
    """Returns a table of medians, and of the ratio within turns."""
    ours, theirs = (seconds[side] for side in SIDES)
    ratios = sorted(their / our for our, their in zip(ours, theirs, strict=True))
    versions = ", ".join(f"{name} {version(name)}" for name in ("tensorflow", "keras", "tf_keras"))
    return "\n".join(
        [
            f"MLP, 22 M parameters, {workers} workers, {len(ratios)} turns; {versions}",
            "| | ms a step (median) |",
            "|---|---|",
            *(f"| {side} | {1000 * statistics.median(seconds[side]):.0f} |" for side in SIDES),
            f"| ratio | {statistics.median(ratios):.2f} (from {ratios[0]:.2f} to {ratios[-1]:.2f}) |",
        ]
    )


if __name__ == "__main__":
    main()
