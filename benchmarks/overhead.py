"""What kdist costs: one rank under the scope against plain Keras, and two ranks against twice plain Keras.

    python benchmarks/overhead.py [--models mlp cnn] [--repeats 9] [--json FILE]

Every process is pinned to one core and computes with one thread. What is compared is run in the same processes, in
turns, and the ratio is taken within a turn, so that a busy machine slows both sides. A turn is one call of `fit`, and
its time that of its fastest epoch but the first: others only ever slow it. Callbacks, input pipeline and the sum of the
metrics are included. Ratios are those of throughput: above 1 is faster than plain Keras on as many cores.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from epoch_times import fastest_epoch

BATCH = 64
STEPS = {"mlp": 150, "cnn": 8}
EPOCHS = 7
THREADS = {"OMP_NUM_THREADS": "1"}  # TensorFlow and kdist count the cores that a process may run on
TITLES = {"mlp": "MLP", "cnn": "CNN"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(STEPS), default=["mlp", "cnn"])
    parser.add_argument("--repeats", type=int, default=9, help="turns of each comparison")
    parser.add_argument("--json", type=Path, help="write every turn's ratios to this file")
    parser.add_argument("--worker", choices=["alone", "pair"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.models, arguments.repeats, arguments.json)
        return
    found = {**launch("alone", arguments), **launch("pair", arguments)}
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "ratios": found}, indent=2) + "\n")
    print(table(found))


# Starting the processes.


def launch(role: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the workers of one comparison and returns what rank 0 found."""
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "-np", "2", "--oversubscribe", "--bind-to", "none"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        command = [sys.executable, __file__, "--worker", role, "--repeats", str(arguments.repeats)]
        command += ["--json", str(report), "--models", *arguments.models]
        environment = {**os.environ, **THREADS, **root, **quiet}
        subprocess.run(mpirun * (role == "pair") + command, env=environment, check=True, stdout=sys.stderr)
        return json.loads(report.read_text())


def worker(role: str, models: list[str], repeats: int, report: Path) -> None:
    """Pins this process to a core before TensorFlow starts its threads, and measures."""
    cores = sorted(os.sched_getaffinity(0))
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    measure = {"alone": compare_alone, "pair": compare_pair}[role]
    found = {f"{name} {what}": ratios for name in models for what, ratios in measure(name, repeats).items()}
    if rank == 0:
        report.write_text(json.dumps(found))


# What is compared.


def compare_alone(name: str, repeats: int) -> dict[str, list[float]]:
    """One process: throughput under the scope relative to plain Keras, a ratio a turn."""
    import kdist

    plain = trainer(name, num_replicas=1)
    with kdist.scope():
        scoped = trainer(name, num_replicas=1)
    return {"1 rank in the scope": [turn(plain, scoped) for turn in turns(repeats)]}


def turns(repeats: int) -> list[Callable[..., float]]:
    """Returns the turns; each second one takes the other order."""

    def forward(plain: Callable[[], float], scoped: Callable[[], float]) -> float:
        seconds = plain()
        return seconds / scoped()

    def backward(plain: Callable[[], float], scoped: Callable[[], float]) -> float:
        seconds = scoped()
        return plain() / seconds

    return [forward if number % 2 else backward for number in range(repeats)]


def compare_pair(name: str, repeats: int) -> dict[str, list[float]]:
    """Two processes: efficiency, a ratio a turn; two plain trainings side by side are what the machine allows."""
    import kdist

    logging.getLogger("kdist").addHandler(logging.NullHandler())  # no report at each call of fit
    plain = trainer(name, num_replicas=1)
    with kdist.scope():
        both = trainer(name, num_replicas=kdist.size())
        # The scope is left: a model made in it stays distributed, and the plain one is nobody's.
    from kdist.callbacks import ReplicaCheck

    efficiency, ceiling, checked = [], [], []
    for _ in range(repeats):
        one = plain() if kdist.rank() == 0 else 0.0
        wait()
        together = both()
        wait()
        at_every_step = both(ReplicaCheck(every=1))
        wait()
        side_by_side = plain()
        wait()
        efficiency.append(one / together)
        ceiling.append(one / side_by_side)
        # What a check costs is taken from one at every step: few steps would hold one at every hundredth.
        checked.append(1 / (1 + (at_every_step / together - 1) / 100))
    return {
        "2 ranks": efficiency,
        "2 plain trainings side by side": ceiling,
        "2 ranks with ReplicaCheck(every=100), relative to 2 ranks": checked,
    }


def wait() -> None:
    """Waits for the other rank, asleep: a busy wait would slow what it waits for."""
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD.Ibarrier()
    while not everyone.Test():
        time.sleep(0.005)


def trainer(name: str, num_replicas: int) -> Callable[..., float]:
    """Returns a function that calls `fit` with callbacks and returns the seconds of its fastest epoch but the first."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    num_rows = BATCH * STEPS[name] * num_replicas
    y = generator.integers(0, 10, num_rows)
    model = {"mlp": mlp, "cnn": cnn}[name]()
    x = generator.random((num_rows, *model.input_shape[1:]), "float32")
    model.compile(
        optimizer=keras.optimizers.SGD(0.01, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

    plain_fit = functools.partial(model.fit, x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)

    def fit(*callbacks: keras.callbacks.Callback) -> float:
        return fastest_epoch(keras, plain_fit, callbacks)

    fit()  # traces
    return fit


def mlp() -> Any:
    """109 386 parameters."""
    import keras

    return keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def cnn() -> Any:
    """1 199 882 parameters, the network of Keras' MNIST example of old."""
    import keras

    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


# What is printed.


def machine() -> str:
    """Returns one line on the machine and the versions."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    versions = ", ".join(f"{name} {version(name)}" for name in ("tensorflow", "keras", "mpi4py", "numpy"))
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}, {versions}"


def table(found: dict[str, list[float]]) -> str:
    """Returns the Markdown table of medians and quartiles."""
    rows = [
        "| model | what, relative to plain Keras on one core | median | quartiles | runs |",
        "|---|---|---|---|---|",
    ]
    for key, ratios in found.items():
        name, what = key.split(" ", 1)
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows.append(
            f"| {TITLES[name]} | {what} | {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} | {len(ratios)} |"
        )
    return "\n".join([f"Batch {BATCH} a rank, SGD with momentum. {machine()}.", "", *rows])


if __name__ == "__main__":
    main()
