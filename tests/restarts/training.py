"""A training that breaks, each time it is started in another way: `python -m tests.restarts.training FOLDER WAY...`.

It goes on from its backup. Each way breaks one start: `KIND[@RANK[:STEP[+SECONDS]]]`, on rank 1 and in step 3 if not
said; `kill@0:5+0.02` kills rank 0 0.02 s after its fifth step, and step 0 is the beginning of the scope. After the
last one training ends, and the chief writes its history and its weights. `BACKUP_SETTINGS` has arguments of the backup,
as JSON; with `IN_PARTS`, slots are in parts; with `LOSE_DISK`, the second start finds no backup on disk, and the third
a damaged one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist
from kdist.checkpoint.storage import files
from tests.callbacks.full_disk import fill_disk

STEP = 3  # of a start, in which it breaks; in the middle of an epoch, and after one step that is not saved


class Broken(keras.callbacks.Callback):
    """Breaks a rank in one of this start's steps.

    Args:
        way: str, as above. The kinds are `"kill"`, `"crash"`, `"stop"`, `"raise"` and `"preempt"`; `"late-kill"` is a
            kill once the next start waits on standby, `"wait"` waits in each step from then on, `"launcher"` kills
            the launcher, `"saving"` this process in the midst of the next checkpoint, `"full"` fills its disk.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        kind, _, where = way.partition("@")
        rank, _, moment = where.partition(":")
        step, _, delay = moment.partition("+")
        self._kind = kind if kdist.rank() == int(rank or 1) else ""
        self._step, self._delay = int(step or STEP), float(delay or 0)
        self._steps = -1
        self._timer: threading.Timer | None = None
        self._next_step()

    def disarm(self) -> None:
        """Does not break any more: nobody waits for a process that is stopped while it exits, but its launcher."""
        if self._timer is not None:
            self._timer.cancel()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Breaks, if it is time."""
        self._next_step()

    def _next_step(self) -> None:
        self._steps = self._steps + 1
        if self._kind == "wait" and self._steps >= self._step:
            Path(sys.argv[1], "waits").touch()
            time.sleep(1)
        if not self._kind or self._steps != self._step:
            return
        if self._delay and self._kind in SIGNALS:  # wherever training is by then: in a save, in a collective
            self._timer = threading.Timer(self._delay, break_down, [self._kind])
            self._timer.daemon = True
            self._timer.start()
        else:
            break_down(self._kind)


SIGNALS = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "stop": signal.SIGSTOP, "preempt": signal.SIGTERM}


def break_down(kind: str) -> None:
    """Breaks this process."""
    if kind == "late-kill":
        wait_for_standby()
        kind = "kill"
    if kind == "raise":
        raise OSError("the disk is gone")
    if kind == "launcher":
        os.kill(launcher(), signal.SIGKILL)
    if kind == "saving":
        die_while_saving()
    if kind == "full":
        fill_disk()
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])


def launcher() -> int:
    """Returns the process id of the launcher, which `kdist run` has started."""
    pid, above = os.getpid(), os.getppid()
    while b"kdist.cli.main" not in Path(f"/proc/{above}/cmdline").read_bytes():
        pid, above = above, int(Path(f"/proc/{above}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def die_while_saving() -> None:
    """Lets the next checkpoint end this process, when its files are written and it has no name yet."""
    write = files._write

    def write_and_die(*args: Any) -> None:
        write(*args)
        break_down("kill")

    files._write = write_and_die


def wait_for_standby() -> None:
    """Waits until two processes are on standby, which have stopped to use the processor."""
    deadline = time.monotonic() + 120
    before: dict[str, str] = {}
    while len(before) < 2 or before != (now := times_on_standby()):
        assert time.monotonic() < deadline, "nothing is on standby"
        before = now if len(before) >= 2 else times_on_standby()
        time.sleep(2)


def times_on_standby() -> dict[str, str]:
    """Returns the processor times of those that are on standby for this folder, by process."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        if is_on_standby(place, sys.argv[1]):
            with contextlib.suppress(OSError):  # it has ended
                found[place.name] = " ".join((place / "stat").read_text().rpartition(")")[2].split()[11:13])
    return found


def is_on_standby(process: Path, folder: str | Path) -> bool:
    """Returns whether a process waits to train in a folder.

    Args:
        process: path, its directory in `/proc`.
        folder: str or path.
    """
    try:
        words = (process / "cmdline").read_text().split("\0")
    except OSError:  # it has ended
        return False
    return "kdist.launchers.worker" in words[:3] and "--standby" in words and os.fspath(folder) in words


def process_start() -> float:
    """Returns when this process was started, in seconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Trains, and breaks in the first way that has not been used."""
    folder, *ways = sys.argv[1:]
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(3)
    x, y = np.random.rand(60, 4), np.random.rand(60, 1)
    with kdist.scope(kdist.AllReduce(shard="optimizer") if "IN_PARTS" in os.environ else "auto"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dropout(0.2)])
        model.add(keras.layers.Dense(1))
        model.compile("adam", "mse", metrics=["mae"])
        starts = Path(folder, f"starts{kdist.rank()}")
        number = len(starts.read_text()) if starts.exists() else 0
        starts.write_text("." * (number + 1))
        kdist.barrier()  # both ranks count each start
        Path(folder, f"started{kdist.rank()}").write_text(str(process_start()))
        if number and "LOSE_DISK" in os.environ and kdist.is_chief():
            shutil.rmtree(Path(folder, "backup"))
            if number > 1:
                damaged = Path(folder, "backup", "checkpoint-00000001")
                damaged.mkdir(parents=True)
                (damaged / "state.json").write_text("{")
        settings = json.loads(os.environ.get("BACKUP_SETTINGS", '{"save_freq": 2}'))
        backup = kdist.callbacks.BackupAndRestore(Path(folder, "backup"), **settings)
        callbacks = [Broken(ways[number])] if number < len(ways) else []
        history = model.fit(
            *(x, y),
            batch_size=5,
            epochs=3,
            verbose=0,
            callbacks=[backup, kdist.callbacks.Preemption(), *callbacks],
        )
        kdist.barrier()
        for each in callbacks:
            each.disarm()
        kdist.barrier()
        if kdist.is_chief():
            logs = {f"log {name}": values for name, values in history.history.items()}
            weights = {f"weight {number}": value for number, value in enumerate(model.get_weights())}
            np.savez(Path(folder, "result.npz"), **logs, **weights)


if __name__ == "__main__":
    main()
