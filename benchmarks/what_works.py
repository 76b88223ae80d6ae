"""What trains a Keras 3 model by `fit` on two processes today, and whether it computes what one process would.

    python benchmarks/what_works.py [--out FILE]

Each system gets the same script: an MLP, SGD with momentum and `clipnorm`, 100 rows in batches of 32, so that the last
batch is short, three epochs without shuffling. Its weights at the end are compared with those of plain Keras in one
process. Horovod is needed for its rows (`kdist install-horovod`).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import versions

from kdist.launchers.start import module_command

ROWS, BATCH, EPOCHS = 100, 32, 3
LIMIT = 180  # seconds
BESIDE = Path(sys.executable).parent

MPI = [str(BESIDE / "mpirun"), "-np", "2", "--oversubscribe", "--bind-to", "none"]
CLUSTER = [*module_command(sys.executable, "kdist.launchers.local_cluster"), "-np", "2"]
HOROVOD = [str(BESIDE / "horovodrun"), "-np", "2", "--gloo"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table to this file, too")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.system:
        train(arguments.system, arguments.weights)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {name: attempt(name, Path(folder, f"{place}.npz")) for place, name in enumerate(SYSTEMS)}
        text = table(found)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def attempt(name: str, weights: Path) -> tuple[Path, str]:
    """Trains by one system; returns where its weights are, and what was said last if there are none."""
    launcher, env, _ = SYSTEMS[name]
    command = [*launcher, sys.executable, __file__, "--system", name, "--weights", str(weights)]
    own = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    own["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    try:
        done = subprocess.run(
            command, env={**os.environ, **own, **env}, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return weights, f"no end after {LIMIT} s"
    errors = [line for line in done.stderr.splitlines() if "Error: " in line and "[kdist]" not in line]
    said = re.sub(r"^\[\d+\]<\w+>:", "", (errors or [f"exit code {done.returncode}"])[0])  # horovodrun's mark
    return weights, "" if done.returncode == 0 else said.strip()


def table(found: dict[str, tuple[Path, str]]) -> str:
    """Returns the table in Markdown."""
    import numpy as np

    def load(path: Path) -> list[Any]:
        with np.load(path) as file:
            return [file[name] for name in file.files]

    plain = load(found["plain Keras, one process"][0])
    rows = ["| system | `fit` on two processes | weights against one process |", "|---|---|---|"]
    for name, (path, error) in found.items():
        if error or not path.exists():
            rows.append(f"| {name} | `{error[:160] or 'no weights'}` | |")
            continue
        mine = load(path)
        gap = max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in zip(mine, plain, strict=True))
        apart = load(path.with_suffix(".1.npz")) if path.with_suffix(".1.npz").exists() else mine
        same = all(np.array_equal(a, b) for a, b in zip(mine, apart, strict=True))
        rows.append(f"| {name} | {'trains' if same else 'trains, and the processes part'} | off by {gap:.1g} |")
    head = "# What trains a Keras 3 model by `fit` on two processes\n\n`python benchmarks/what_works.py`. "
    note = "Off by: the largest difference, relative to the largest entry of the variable. Rounding of float32 is 1e-7."
    return f"{head}{versions('tensorflow', 'keras', 'horovod')}.\n\n" + "\n".join(rows) + f"\n\n{note}\n"


def train(name: str, weights: Path) -> None:
    """What each process runs: trains, and writes its weights; those of the second process beside the first's."""
    import numpy as np

    model, rank = SYSTEMS[name][2]()
    path = weights if rank == 0 else weights.with_suffix(f".{rank}.npz")
    np.savez(path, *[np.asarray(value) for value in model.get_weights()])


def data() -> Any:
    import numpy as np

    random = np.random.default_rng(0)
    return random.normal(size=(ROWS, 8)).astype("float32"), random.normal(size=(ROWS, 3)).astype("float32")


def compiled(wrap: Callable[[Any], Any] = lambda optimizer: optimizer) -> Any:
    """Returns a model with the same weights everywhere."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)])
    model.compile(wrap(keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5)), "mse")
    return model


def fit(model: Any, *, x: Any = None, batch_size: int = BATCH, **options: Any) -> Any:
    given = data() if x is None else x
    model.fit(*given, batch_size=batch_size, epochs=EPOCHS, shuffle=False, verbose=0, **options)
    return model


def plain() -> tuple[Any, int]:
    return fit(compiled()), 0


def kdist_scope() -> tuple[Any, int]:
    import kdist

    with kdist.scope(scale_batch=False):
        return fit(compiled()), kdist.rank()


def multi_worker() -> tuple[Any, int]:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = compiled()
    return fit(model), strategy.cluster_resolver.task_id


def mirrored() -> tuple[Any, int]:
    import tensorflow as tf

    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = compiled()
    return fit(model), 0


def parameter_server() -> tuple[Any, int]:
    import json

    import tensorflow as tf

    from kdist.launchers.hosts.ports import free_ports

    ps, worker, chief = (f"localhost:{port}" for port in free_ports(3))
    cluster = {"ps": [ps], "worker": [worker], "chief": [chief]}
    for job in ("ps", "worker"):
        tf.distribute.Server(cluster, job_name=job, task_index=0, start=True)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    with tf.distribute.ParameterServerStrategy(resolver).scope():
        model = compiled()
    return fit(model), 0


def horovod(with_callbacks: bool = False) -> tuple[Any, int]:
    import horovod.tensorflow.keras as hvd

    hvd.init()
    x, y = data()
    own = (x[hvd.rank() :: 2], y[hvd.rank() :: 2])
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if with_callbacks else []
    return fit(compiled(hvd.DistributedOptimizer), x=own, batch_size=BATCH // 2, callbacks=callbacks), hvd.rank()


def horovod_with_callbacks() -> tuple[Any, int]:
    return horovod(with_callbacks=True)


# How each is started, with which variables, and what it does: returns the model and this process's number.
SYSTEMS: dict[str, tuple[list[str], dict[str, str], Callable[[], tuple[Any, int]]]] = {
    "plain Keras, one process": ([], {}, plain),
    "kdist, MPI": (MPI, {}, kdist_scope),
    "kdist, Horovod": (HOROVOD, {}, kdist_scope),
    "kdist, TensorFlow's collective ops": (CLUSTER, {}, kdist_scope),
    "kdist, a worker and a parameter server": ([*CLUSTER[:-1], "3", "--ps", "1"], {}, kdist_scope),
    "Horovod's `DistributedOptimizer`": (HOROVOD, {}, horovod),
    "the same, with `BroadcastGlobalVariablesCallback`": (HOROVOD, {}, horovod_with_callbacks),
    "`MultiWorkerMirroredStrategy`": (CLUSTER, {}, multi_worker),
    "`ParameterServerStrategy`": ([], {}, parameter_server),
    "`MirroredStrategy`, two devices of one process": ([], {}, mirrored),
}


if __name__ == "__main__":
    main()
