"""What a contender's process is given to do, and how it says what it found."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models import MODELS, random_data


@dataclasses.dataclass(frozen=True)
class Task:
    """Models to train, one after the other.

    Attributes:
        models: tuple of str, keys of `MODELS`.
        epochs: int, the epochs of each; at least 2, as the first one is not measured.
        steps: int or `None`, the steps of an epoch; `None`: the model's own number.
        rank: int, this process's number.
        ranks: int, the number of processes.
        folder: path, where each rank reports.
    """

    models: tuple[str, ...]
    epochs: int
    steps: int | None
    rank: int
    ranks: int
    folder: Path

    def num_steps(self, name: str) -> int:
        """Returns the steps of an epoch."""
        return self.steps or MODELS[name].steps

    def own_data(self, name: str) -> tuple[Any, Any]:
        """Returns an epoch of this rank's own data."""
        return random_data(name, MODELS[name].batch * self.num_steps(name), seed=self.rank)

    def global_data(self, name: str) -> tuple[Any, Any]:
        """Returns an epoch of all ranks' data, the same on each."""
        return random_data(name, MODELS[name].batch * self.num_steps(name) * self.ranks)

    def report(self, name: str, epoch_seconds: float, weights: Sequence[Any]) -> None:
        """Says how long an epoch took, and what the weights are now.

        Args:
            name: str, the model.
            epoch_seconds: float, the time of the fastest epoch.
            weights: sequence of NumPy arrays, the trainable ones. Statistics of batch normalisation are each rank's
                own in some frameworks.
        """
        line = {
            "model": name,
            "seconds": epoch_seconds / self.num_steps(name),
            "parameters": sum(int(value.size) for value in weights),
            # Of absolute values: nothing cancels out, so that a relative difference means something.
            "sums": [float(abs(value).sum(dtype="float64")) for value in weights],
        }
        with open(self.folder / f"{self.rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


def own_rank(env: Mapping[str, str] = os.environ) -> int:
    """Returns this process's number, which each launcher says in its own way; 0 without one."""
    if "TF_CONFIG" in env:
        return int(json.loads(env["TF_CONFIG"])["task"]["index"])
    return int(next((env[name] for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK") if name in env), "0"))
