"""What `kdist plan` says a rank will hold at most, against what it held: the models of models.py, with Adam.

    python benchmarks/planned_memory.py [--ranks 2] [--models mlp large ...] [--out DIR]

The script that is planned and the one that runs under mpirun are this file. `large` is the MLP of memory.py, 105 MB.
Noted are the peaks of the whole process (`VmHWM` of /proc), those of the largest rank. Small models are almost all
process: the last column compares what is held beside it. DIR gets planned_memory.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from launching import run_well
from machine import machine
from memory import LIMIT, PACKAGES, SETTINGS, status
from models import MODELS, random_data

KINDS = {"all-reduce": "None", 'shard="optimizer"': "optimizer"}  # by the plan's strategy: `shard`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=["large", *MODELS], choices=["large", *MODELS])
    parser.add_argument("--out", type=Path, default=Path("build"), metavar="DIR")
    parser.add_argument("--train", nargs=3, metavar=("MODEL", "SHARD", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(*arguments.train)
        return
    lines = [
        "# Planned and measured memory of a rank\n",
        f"`python benchmarks/planned_memory.py --ranks {arguments.ranks}`. {machine(*PACKAGES)}\n",
        "Peaks of the largest rank in MB, the process included; Adam.\n",
        "| model | | planned | measured | difference | planned beside the process |",
        "|---|---|---:|---:|---:|---:|",
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.models:
        planned = plan(name, arguments.ranks)
        for kind, shard in KINDS.items():
            share = planned[kind]
            held = measured(name, arguments.ranks, shard)
            difference = share["peak"] / held - 1
            beside = share["peak"] - share["process"]
            lines.append(
                f"| {name} | `{kind}` | {share['peak'] / 1e6:.0f} | {held / 1e6:.0f} | {difference:+.0%} "
                f"| {beside / 1e6:.0f} |"
            )
            print(lines[-1], flush=True)
        (arguments.out / "planned_memory.md").write_text("\n".join(lines) + "\n")


def plan(name: str, ranks: int) -> dict[str, Any]:
    """Returns what `kdist plan` says of a rank, by strategy."""
    command = [sys.executable, "-m", "kdist", "plan", "-np", str(ranks), "--json", __file__]
    done = subprocess.run(
        [*command, "--train", name, "None", "."], capture_output=True, text=True, check=True, timeout=2 * LIMIT
    )
    return {each["strategy"]: each["ranks"][0] for each in json.loads(done.stdout)["strategies"]}


def measured(name: str, ranks: int, shard: str) -> int:
    """Returns what the largest of some ranks holds at most, in bytes."""
    mpirun = Path(sys.executable).parent / "mpirun"
    with tempfile.TemporaryDirectory() as folder:
        command = [str(mpirun), "--oversubscribe", "-np", str(ranks), sys.executable, __file__]
        run_well([*command, "--train", name, shard, folder], SETTINGS, LIMIT)
        return max(int(path.read_text()) for path in Path(folder).iterdir())


def train(name: str, shard: str, folder: str) -> None:
    """What each rank runs."""
    import keras
    import numpy as np

    import kdist

    with kdist.scope(kdist.AllReduce(shard="optimizer" if shard == "optimizer" else None)):
        if name == "large":
            layers = [keras.layers.Dense(2048, "relu") for _ in range(7)]
            model = keras.Sequential([keras.Input((512,)), *layers, keras.layers.Dense(10)])
            x, y, batch = np.zeros((64, 512), "float32"), np.zeros(64, "int64"), 8
        else:
            model, batch = MODELS[name].build(keras), MODELS[name].batch
            x, y = random_data(name, 8 * batch)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(x, y, batch_size=batch, epochs=2, verbose=0)
    Path(folder, str(kdist.rank())).write_text(str(status("VmHWM")))


if __name__ == "__main__":
    main()
