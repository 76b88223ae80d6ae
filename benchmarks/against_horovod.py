"""kdist over Horovod against Horovod's own Keras binding, which needs legacy Keras.

    pip install tf_keras
    python benchmarks/against_horovod.py [--models mlp cnn] [--controller gloo|mpi] [--repeats 9] [--json FILE]

Both train the same model on the same two processes, through the same Horovod, in turns: Keras 3 in `kdist.scope()`, and
legacy Keras with `hvd.DistributedOptimizer` and Horovod's broadcast, each rank on data of its own, as its users write
it. Every process is pinned to one core and computes with one thread. A turn is one call of `fit`, and its time that of
its fastest epoch but the first: others only ever slow it. Ratios are those of throughput, taken within a turn: above 1,
kdist is faster. What the two Kerases have of it is measured beside, in one process without kdist and Horovod.
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
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from epoch_times import fastest_epoch

BATCH = {"mlp": 64, "cnn": 64, "wide": 64, "resnet": 32}
STEPS = {"mlp": 150, "cnn": 8, "wide": 8, "resnet": 4}
TITLES = {"mlp": "MLP 0.11 M", "cnn": "CNN 1.2 M", "wide": "MLP 22 M", "resnet": "ResNet-20 0.27 M"}
EPOCHS = 5
RANKS = 2
THREADS = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--controller", choices=["gloo", "mpi"], default="gloo", help="horovodrun, or mpirun")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each comparison")
    parser.add_argument("--json", type=Path, help="write every turn's ratio to this file")
    parser.add_argument("--worker", choices=["alone", "pair"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.models, arguments.repeats, arguments.json)
        return
    found = {role: launch(role, arguments) for role in ("alone", "pair")}
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "ratios": found}, indent=2) + "\n")
    print(table(found, arguments.controller))


# Starting the processes.


def launch(role: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Runs the workers of one comparison and returns what rank 0 found."""
    beside = Path(sys.executable).parent
    line = {
        "gloo": [str(beside / "horovodrun"), "-np", str(RANKS), "--gloo"],
        "mpi": [str(beside / "mpirun"), "-np", str(RANKS), "--oversubscribe", "--bind-to", "none"],
    }[arguments.controller]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    legacy = {"TF_USE_LEGACY_KERAS": "1", "KDIST_STRATEGY": "horovod"}
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        command = [sys.executable, __file__, "--worker", role, "--repeats", str(arguments.repeats)]
        command += ["--json", str(report), "--models", *arguments.models]
        environment = {**os.environ, **THREADS, **root, **quiet, **legacy}
        subprocess.run(line * (role == "pair") + command, env=environment, check=True, stdout=sys.stderr)
        return json.loads(report.read_text())


def worker(role: str, models: list[str], repeats: int, report: Path) -> None:
    """Pins this process to a core before TensorFlow starts its threads, and measures."""
    cores = sorted(os.sched_getaffinity(0))
    rank = int(os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0")
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    measure = {"alone": compare_kerases, "pair": compare}[role]
    found = {name: measure(name, repeats) for name in models}
    if rank == 0:
        report.write_text(json.dumps(found))


# What is compared.


def compare(name: str, repeats: int) -> list[float]:
    """Returns the throughput of kdist relative to Horovod's binding, a ratio a turn."""
    import kdist

    logging.getLogger("kdist").addHandler(logging.NullHandler())  # no report at each call of fit
    with kdist.scope(scale_lr=None):
        ours = with_kdist(name)
    theirs = with_horovod(name)
    ratios = []
    for number in range(repeats):
        if number % 2:
            seconds = ours()
            kdist.barrier()
            ratios.append(theirs() / seconds)
        else:
            seconds = theirs()
            kdist.barrier()
            ratios.append(seconds / ours())
        kdist.barrier()
    return ratios


def compare_kerases(name: str, repeats: int) -> list[float]:
    """Returns the throughput of Keras 3 relative to legacy Keras in one process, a ratio a turn."""
    import keras
    import tf_keras

    new, legacy = plain(keras, name, STEPS[name]), plain(tf_keras, name, STEPS[name])
    ratios = []
    for number in range(repeats):
        if number % 2:
            seconds = new()
            ratios.append(legacy() / seconds)
        else:
            seconds = legacy()
            ratios.append(seconds / new())
    return ratios


def with_kdist(name: str) -> Callable[[], float]:
    """Returns a function that trains by Keras 3 in the open scope and returns an epoch's seconds."""
    import keras

    import kdist

    return plain(keras, name, STEPS[name] * kdist.size())


def plain(keras: Any, name: str, num_batches: int) -> Callable[[], float]:
    """Returns a function that trains by either Keras, as any script does, and returns an epoch's seconds."""
    x, y = data(name, num_batches=num_batches, seed=0)
    model = network(keras, name)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss_of(keras), metrics=["accuracy"])
    return trainer(keras, model, x, y, BATCH[name], [])


def with_horovod(name: str) -> Callable[[], float]:
    """Returns a function that trains by Horovod's binding on legacy Keras and returns an epoch's seconds."""
    import horovod.tensorflow.keras as hvd
    import tf_keras as keras

    hvd.init()
    x, y = data(name, num_batches=STEPS[name], seed=hvd.rank())
    model = network(keras, name)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size(), momentum=0.9))
    model.compile(optimizer, loss_of(keras), metrics=["accuracy"])
    # Without its MetricAverageCallback, which asks Keras 3 for what only legacy Keras has.
    run = trainer(keras, model, x, y, BATCH[name], [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    sums = hvd.allgather([float(abs(model.get_weights()[0]).sum())], name="same weights")
    if max(sums) - min(sums) > 1e-4 * max(sums):
        sys.exit("Horovod's binding did not synchronise")
    return run


def trainer(keras: Any, model: Any, x: Any, y: Any, batch_size: int, callbacks: list[Any]) -> Callable[[], float]:
    """Returns a function that calls `fit` and returns the seconds of its fastest epoch but the first."""
    fit = functools.partial(model.fit, x, y, batch_size=batch_size, epochs=EPOCHS, verbose=0)
    run = functools.partial(fastest_epoch, keras, fit, callbacks)
    run()  # traces
    return run


def data(name: str, num_batches: int, seed: int) -> tuple[Any, Any]:
    """Returns random rows and labels."""
    import numpy as np

    generator = np.random.default_rng(seed)
    shape = {"mlp": (784,), "cnn": (28, 28, 1), "wide": (784,), "resnet": (32, 32, 3)}[name]
    num_rows = BATCH[name] * num_batches
    return generator.random((num_rows, *shape), "float32"), generator.integers(0, 10, num_rows)


def loss_of(keras: Any) -> Any:
    """Returns the loss, of either Keras."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network(keras: Any, name: str) -> Any:
    """Returns a model, of either Keras."""
    layers = keras.layers
    if name == "resnet":
        return resnet20(keras)
    hidden = {
        "mlp": [layers.Dense(128, activation="relu"), layers.Dense(64, activation="relu")],
        "wide": [layers.Dense(4096, activation="relu"), layers.Dense(4096, activation="relu")],
        "cnn": [
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
        ],
    }[name]
    shape = (28, 28, 1) if name == "cnn" else (784,)
    return keras.Sequential([keras.Input(shape), *hidden, layers.Dense(10)])


def resnet20(keras: Any) -> Any:
    """Returns the residual network for 32 x 32 images of He et al. (2015), 20 layers deep."""
    layers = keras.layers

    def normed(x: Any, filters: int, size: int, strides: int) -> Any:
        return layers.BatchNormalization()(layers.Conv2D(filters, size, strides, "same", use_bias=False)(x))

    inputs = keras.Input((32, 32, 3))
    x = layers.ReLU()(normed(inputs, 16, 3, 1))
    for filters in (16, 32, 64):
        for block in range(3):
            strides = 2 if filters > 16 and block == 0 else 1
            inner = layers.ReLU()(normed(x, filters, 3, strides))
            shortcut = normed(x, filters, 1, strides) if strides == 2 else x
            x = layers.ReLU()(layers.Add()([normed(inner, filters, 3, 1), shortcut]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


# What is printed.


def machine() -> str:
    """Returns one line on the machine and the versions."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    versions = ", ".join(f"{name} {version(name)}" for name in ("tensorflow", "keras", "tf_keras", "horovod"))
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}, {versions}"


def table(found: dict[str, dict[str, list[float]]], controller: str) -> str:
    """Returns the Markdown table of medians and quartiles."""
    rows = [
        "| model | batch a rank | kdist's throughput, relative to Horovod's binding | quartiles "
        "| Keras 3, relative to legacy Keras, one process | quartiles | turns |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, ratios in found["pair"].items():
        cells = [TITLES[name], str(BATCH[name]), *spread(ratios), *spread(found["alone"][name]), str(len(ratios))]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([f"{RANKS} ranks over Horovod ({controller}), SGD with momentum. {machine()}.", "", *rows])


def spread(ratios: list[float]) -> list[str]:
    """Returns the median and the quartiles."""
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return [f"{statistics.median(ratios):.3f}", f"{low:.3f} to {high:.3f}"]


if __name__ == "__main__":
    main()
