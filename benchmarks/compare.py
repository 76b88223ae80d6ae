"""kdist against its peers: Keras 3, tf_keras with Horovod or MultiWorkerMirroredStrategy, PyTorch DDP, Keras on JAX.

    pip install tf_keras torch jax matplotlib && kdist install-horovod
    python benchmarks/compare.py [--models mlp cnn] [--contenders plain_keras kdist_mpi] [--turns 5] [--out DIR]
    python benchmarks/compare.py --input cached --contenders plain_keras kdist_mpi    # tf.data in the place of arrays
    python benchmarks/compare.py --device gpu [--contenders plain_keras scope kdist_mpi]    # Keras 3, on one GPU
    python benchmarks/compare.py --report DIR/compare.json    # only writes tables and plot anew

In each turn every contender is launched once, in an order that each second turn reverses. It trains all models, one
after the other: some steps that trace, and then a `fit` of one long epoch, which is measured in three ways: the median
time between the ends of batches ("steady"), the epoch, and the whole call, which plain Keras ends late when `tf.data`'s
threads are waited for. Ratios are taken within a turn.

Each process is pinned to one core of its own and computes with one thread; with `--device gpu`, to an equal share of
the cores, and all share the first GPU of CUDA_VISIBLE_DEVICES. Each rank has a batch of the same size, so that two
ranks have twice the rows a step. A contender whose package is missing is left out. One that fails, is not done
in time, or whose ranks end with different weights is reported, and the others go on. DIR gets compare.md, compare.json
and compare.svg, also when the run is interrupted.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from comparison import compare, say
from comparison_plot import draw
from comparison_tables import tables
from contenders import CONTENDERS
from contenders.task import DEVICES, INPUTS, Task, own_rank
from models import MODELS


def main() -> None:
    arguments = parse()
    if arguments.worker:
        work(arguments)
        return
    if arguments.report:
        write(arguments.out or arguments.report.parent, read(arguments.report))
        return
    out = arguments.out or Path("build", "compare")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # what was started is ended then, too
    try:
        compare(arguments, Path(__file__).resolve(), functools.partial(save, out))
    finally:
        if (out / "compare.json").exists():
            write(out, json.loads((out / "compare.json").read_text()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="by default all that take the input")
    parser.add_argument("--input", choices=list(INPUTS), default="arrays", help="of `fit`; datasets are for Keras 3")
    parser.add_argument("--device", choices=list(DEVICES), default="cpu", help="gpu is for Keras 3 on TensorFlow")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--limit", type=float, default=600, help="seconds that a launch may take")
    parser.add_argument("--out", type=Path, metavar="DIR", help="build/compare by default")
    parser.add_argument("--report", type=Path, metavar="JSON", help="only write tables and plot of these numbers")
    parser.add_argument("--steps", type=int, help="of the epoch that is measured; by default each model has its own")
    parser.add_argument("--worker", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < 2:
        parser.error(f"--steps must be at least 2, as a step is what lies between two ends: {arguments.steps}")
    able = [name for name in CONTENDERS if CONTENDERS[name].takes(arguments.input, arguments.device)]
    arguments.contenders = arguments.contenders or able
    if unable := [name for name in arguments.contenders if name not in able]:
        asked = f"--input {arguments.input} --device {arguments.device}"
        parser.error(f"{asked} is for {' '.join(able)}, not for {' '.join(unable)}")
    return arguments


def work(arguments: argparse.Namespace) -> None:
    """What each process runs: pins itself to a core, before any framework starts its threads, and trains."""
    contender, rank, cores = CONTENDERS[arguments.worker], own_rank(), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[rank :: contender.ranks] if arguments.device == "gpu" else {cores[rank % len(cores)]})
    module, function = contender.train.split(":")
    models, folder = tuple(arguments.models), arguments.folder
    task = Task(models, arguments.steps, rank, contender.ranks, folder, arguments.input)
    getattr(importlib.import_module(f"contenders.{module}"), function)(task)


def read(path: Path) -> dict[str, Any]:
    """Returns the raw numbers of a file."""
    record: dict[str, Any] = json.loads(path.read_text())
    if not all(isinstance(run["seconds a step"], dict) for run in record["runs"]):
        sys.exit(
            f"{path} has whole epochs only, as compare.py measured once. Expected: the times of steady steps, of the "
            "epoch and of the whole `fit`. Fix: measure anew, without --report."
        )
    return record


def save(out: Path, record: dict[str, Any]) -> None:
    """Writes the raw numbers."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "compare.json").write_text(json.dumps(record, indent=1) + "\n")


def write(out: Path, record: dict[str, Any]) -> None:
    """Writes the tables and the plot."""
    out.mkdir(parents=True, exist_ok=True)
    text = tables(record)
    (out / "compare.md").write_text(text)
    print(text)
    try:
        draw(record, out / "compare.svg")
    except ModuleNotFoundError as error:
        say(f"no plot: {error}")


if __name__ == "__main__":
    main()
