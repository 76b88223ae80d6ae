"""One CPU: one process with as many threads as cores against as many processes with a core each, at equal batches.

    python benchmarks/processes_or_threads.py [--models mlp cnn wide] [--turns 5] [--json FILE]

Plain Keras takes the global batch in one process; kdist's processes take 64 rows of it each. Both are started anew in
each turn, one after the other, in changing order; a turn's ratio is of the throughputs of the fastest epochs. Above 1,
processes are faster. Alone on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from epoch_times import fastest_epoch
from machine import machine
from models import MODELS, compile_model, random_data

EPOCHS = 6
PACKAGES = ("tensorflow", "keras", "mpi4py", "numpy")
TITLES = {"mlp": "MLP, 0.11 M parameters", "cnn": "CNN, 1.2 M", "wide": "MLP, 22 M"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(TITLES), default=sorted(TITLES))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every turn's ratio to this file")
    parser.add_argument("--worker", choices=sorted(TITLES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments.worker)
        return
    cores = len(os.sched_getaffinity(0))
    found = {name: [turn(name, cores, number) for number in range(arguments.turns)] for name in arguments.models}
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(*PACKAGES), "ratios": found}, indent=2) + "\n")
    print(f"{machine(*PACKAGES)}\n\n| model | {cores} processes against {cores} threads | quartiles | turns |")
    print("|---|---|---|---|")
    for name, ratios in found.items():
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(f"| {TITLES[name]} | {middle:.2f} | {low:.2f} to {high:.2f} | {len(ratios)} |")


def turn(name: str, cores: int, number: int) -> float:
    """Returns the throughput of processes relative to that of threads."""
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "-np", str(cores), "--oversubscribe", "--bind-to", "none"]
    seconds = {}
    for side, launcher in sorted({"processes": mpirun, "threads": []}.items(), reverse=bool(number % 2)):
        command = [*launcher, sys.executable, __file__, "--worker", name]
        own = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(command, env={**os.environ, **own}, check=True, stdout=subprocess.PIPE, text=True)
        seconds[side] = float(done.stdout.split()[-1])
    return seconds["threads"] / seconds["processes"]


def train(name: str) -> None:
    """What each process runs; the chief prints the seconds of its fastest epoch."""
    import keras

    import kdist

    replicas = len(os.sched_getaffinity(0))  # of rows, whoever trains on them
    keras.utils.set_random_seed(0)
    with kdist.scope():
        model = MODELS[name].build(keras)
        compile_model(keras, model)
        x, y = random_data(name, MODELS[name].batch * replicas * MODELS[name].steps)
        batch = MODELS[name].batch * replicas // kdist.size()

        def fit(callbacks: list[Any]) -> None:
            model.fit(x, y, batch_size=batch, epochs=EPOCHS, verbose=0, callbacks=callbacks)

        seconds = fastest_epoch(keras, fit)
    if kdist.is_chief():
        print(seconds)


if __name__ == "__main__":
    main()
