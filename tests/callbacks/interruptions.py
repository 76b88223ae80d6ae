"""What ends a save or a training before its time: SIGKILL at random moments, a full disk, a scheduler's signal."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np

from kdist.checkpoint.storage.files import CheckpointDirectory
from kdist.reports.output import REPORT_PREFIX
from tests.callbacks.interrupted_training import KILL, WRITERS
from tests.callbacks.saver import LENGTH
from tests.helpers import spmd
from tests.helpers.jobs import Job

LONGEST_SAVE = 0.04  # seconds, about


def kill_saver(folder: Path, moments: int, seed: int) -> list[int]:
    """Kills a saver at random moments; checks after each that the newest checkpoint is whole and nothing is lost.

    Returns:
        The number of the newest checkpoint after each kill.
    """
    generator, newest, numbers = random.Random(seed), 0, []
    for _ in range(moments):
        with subprocess.Popen(
            [sys.executable, "-m", "tests.callbacks.saver", str(folder)],
            cwd=spmd.ROOT,
            env={**os.environ, **spmd.LEAN},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                said = [process.stdout.readline()]
                time.sleep(generator.uniform(0.0, LONGEST_SAVE))
            finally:
                process.kill()
            said += process.stdout.read().splitlines(keepends=True)
        # What was said is written; one more may be, of which nobody could be told.
        saved = max((int(line) for line in said if line.endswith("\n")), default=newest)
        found = CheckpointDirectory(folder).read()[1]["part"]
        newest = found["number"]
        assert saved <= newest <= saved + 1, (saved, newest)
        assert (found["values"] == newest).all()
        assert len(found["values"]) == LENGTH
        assert len([each for each in folder.iterdir() if each.name.startswith("checkpoint-")]) <= 3
        numbers.append(newest)
    return numbers


def kill_model_saver(folder: Path, moments: int, seed: int) -> list[int]:
    """Kills ModelCheckpoint at random moments of its saving; checks after each that plain Keras loads the newest model.

    Returns:
        The number in the model's weights after each kill.
    """
    generator, newest, numbers = random.Random(seed), 0, []
    path = folder / "model.keras"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.callbacks.model_saver", str(path)],
        cwd=spmd.ROOT,
        env={**os.environ, "KERAS_BACKEND": "numpy"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        try:
            for _ in range(moments):
                process.stdin.write(f"{newest}\n")
                child = int(process.stdout.readline())
                said = [int(process.stdout.readline())]
                time.sleep(generator.uniform(0.0, LONGEST_SAVE))
                os.kill(child, signal.SIGKILL)
                said += map(int, iter(process.stdout.readline, "ended\n"))
                weights = keras.models.load_model(path).get_weights()
                newest = int(weights[0][0, 0])
                assert said[-1] <= newest <= said[-1] + 1, (said, newest)
                assert all(np.all(each == newest) for each in weights)
                numbers.append(newest)
        finally:
            process.kill()
    return numbers


def interrupt_training(folder: Path, ends: Sequence[str], seed: int, on: Job) -> None:
    """Ends a training in several ways, then lets it go on: it comes to where one comes that was never interrupted.

    Each time the whole job ends, and what was saved stays: the checkpoint, and ModelCheckpoint's model.

    Args:
        folder: path, the training's.
        ends: sequence of str: `KILL`, a rank at a random moment, or of `WRITERS` the one that finds the disk full.
        seed: int, of the moments and ranks.
        on: `Job`.
    """
    generator = random.Random(seed)
    command = ["-m", "tests.callbacks.interrupted_training", str(folder)]
    for end in ends:
        moment = [str(generator.randrange(on.ranks)), f"{generator.uniform(0.0, 0.5):.3f}"] if end == KILL else []
        done = on.launch([*command, end, *moment], timeout=150)
        assert done.returncode, done.output[-3000:]
        assert not done.timed_out, done.output[-3000:]
        assert any(name.startswith("checkpoint-") for name in os.listdir(folder)), "ended before anything was saved"
        model = folder / "last.keras"
        if model.exists():
            assert int(keras.models.load_model(model).optimizer.iterations) > 0
        if end != KILL:
            assert end in WRITERS
            assert done.output.count(f"{REPORT_PREFIX}0 of {on.ranks}") == done.output.count(REPORT_PREFIX) == 1, (
                done.output[-3000:]
            )
            assert "File too large" in done.output, done.output[-3000:]
            assert model.exists()
            if KILL not in ends[: ends.index(end)]:
                assert not list(folder.glob(".checkpoint-*"))  # nothing half is left
    done = on.launch(command, timeout=240)
    assert done.returncode == 0, done.output[-3000:]
    for rank in range(on.ranks):
        assert f"rank {rank}: equal" in done.output, done.output[-3000:]
    assert "training resumes from checkpoint-" in done.output, done.output[-3000:]


def preempt_training(folder: Path, on: Job) -> None:
    """Tells the last rank of a training to go: all save after the same step, and the job ends with the right code."""
    command = ["-m", "tests.callbacks.preempted_training", str(folder)]
    done = on.launch(command, timeout=150)
    if on.launcher.startswith("horovodrun"):
        assert done.returncode, done.output[-3000:]  # of its own: it does not pass on the ranks'
    else:
        assert done.returncode == 75, (done.returncode, done.output[-3000:])
    # A callback of the script's looks between steps: ranks exchange their votes there.
    assert f"SIGUSR1 on rank {on.ranks - 1}: saved after step 3 of epoch 1" in done.output, done.output[-3000:]
    assert "came to its end" not in done.output
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-00000001"]
