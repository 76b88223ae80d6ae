"""Starts the training that breaks under `kdist run --restarts`, and says what came of it."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.helpers import spmd
from tests.restarts import resized

LIMIT = 300.0  # seconds for a start of two ranks that train, on a busy machine


@dataclasses.dataclass(frozen=True)
class Trained:
    """What came of a training.

    Attributes:
        attempts: list of dict, from `restarts.json`.
        result: mapping of str to array, the history and the weights, by name.
        said: str, what the command said.
    """

    attempts: list[dict[str, Any]]
    result: Mapping[str, npt.NDArray[Any]]
    said: str

    def differences(self, other: Trained) -> list[str]:
        """Returns the names of what is not bit for bit the same in another training."""
        names = {*self.result, *other.result}
        return sorted(name for name in names if not np.array_equal(self.result.get(name), other.result.get(name)))


def run(
    *arguments: str, timeout: float, python: str = sys.executable, ranks: int = 2, env: Mapping[str, str] | None = None
) -> spmd.Finished:
    """Runs `kdist run` on some ranks, to its end.

    Args:
        *arguments: str, what follows `-np`.
        timeout: float, seconds.
        python: str, the interpreter.
        ranks: int, how many.
        env: mapping, environment variables on top.
    """
    command = [python, "-m", "kdist.cli.main", "run", "-np", str(ranks), *arguments]
    done = spmd.execute(command, env={**spmd.RANK_ENVIRONMENT, **(env or {})}, timeout=timeout)
    assert not done.timed_out, done.output
    return done


def train(
    folder: Path,
    *ways: str,
    strategy: str = "mpi",
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Trained:
    """Trains two ranks to the end, with one restart until a new checkpoint.

    Args:
        folder: path, where the backup and the output go.
        *ways: str, how each start but the last one breaks; see `tests.restarts.training`.
        strategy: str, a word.
        python: str, the interpreter.
        env: mapping, environment variables on top.
        options: sequence of str, more options of `kdist run`.
    """
    options = ("--restarts", "1", "--output", os.fspath(folder / "out"), "--strategy", strategy, *options)
    program = ("-m", "tests.restarts.training", os.fspath(folder), *ways)
    done = run(*options, *program, timeout=LIMIT * (len(ways) + 1), python=python, env=env)
    assert done.returncode == 0, done.output[-6000:]
    attempts = json.loads((folder / "out" / "restarts.json").read_text())["attempts"]
    return Trained(attempts, result_of(folder), done.output)


def heal(
    folder: Path, *ways: str, ranks: int, restarts: int, env: Mapping[str, str] | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """Trains to the end, in the same processes where that is possible; returns what was said and the attempts.

    Args:
        folder: path, where the backup and the output go.
        *ways: str, how each run of the script but the last one breaks; see `tests.restarts.healed`.
        ranks: int, how many.
        restarts: int, how many restarts there may be.
        env: mapping, environment variables on top.
    """
    options = ("--restarts", str(restarts), "--heal", "in-process", "--output", os.fspath(folder / "out"))
    program = ("-m", "tests.restarts.healed", os.fspath(folder), *ways)
    done = run(*options, *program, ranks=ranks, timeout=LIMIT * (len(ways) + 1), env=env)
    assert done.returncode == 0, done.output[-6000:]
    assert resized.difference(folder, "arrays") < resized.TOLERANCE
    return done.output, json.loads((folder / "out" / "restarts.json").read_text())["attempts"]


def healings(attempts: Sequence[Mapping[str, Any]]) -> list[list[tuple[list[int], int]]]:
    """Returns for each attempt which ranks were lost, and how many went on."""
    return [[(each["ranks_lost"], each["ranks_left"]) for each in attempt["healings"]] for attempt in attempts]


def result_of(folder: Path) -> Mapping[str, npt.NDArray[Any]]:
    """Returns the history and the weights that a training has left in a folder, by name."""
    with np.load(folder / "result.npz") as saved:
        return {name: saved[name] for name in saved.files}


def causes(attempts: Sequence[Mapping[str, Any]]) -> list[tuple[str, int | None]]:
    """Returns the cause of each attempt's end, with the blamed rank."""
    return [(each["cause"], each["rank"]) for each in attempts]
