"""What a contender's process is given to do, and how it says what it found."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fit_times import FitTimes
from models import MODELS, random_data

WARM_UP_STEPS = 3  # of a first fit, which traces; it is not measured
LONG = 6  # the epoch that is measured, relative to that of other benchmarks: some seconds

# What `fit` is given. Only Keras 3 on TensorFlow takes others than arrays here.
INPUTS = {
    "arrays": "arrays",
    "slices": "`from_tensor_slices(...).batch(...).prefetch(2)`",
    "cached": "`from_tensor_slices(...).batch(...).cache().repeat().prefetch(2)`",
}

# The environment of processes on each kind of device. On a GPU without growth the first takes all of the memory.
DEVICES = {
    "cpu": {"CUDA_VISIBLE_DEVICES": "-1"},
    "gpu": {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    },
}


@dataclasses.dataclass(frozen=True)
class Task:
    """Models to train, one after the other.

    Attributes:
        models: tuple of str, keys of `MODELS`.
        steps: int or `None`, the steps of the epoch that is measured; `None`: the model's own number.
        rank: int, this process's number.
        ranks: int, the number of processes.
        folder: path, where each rank reports.
        input: str, a key of `INPUTS`.
    """

    models: tuple[str, ...]
    steps: int | None
    rank: int
    ranks: int
    folder: Path
    input: str = "arrays"

    def num_steps(self, name: str) -> int:
        """Returns the steps of an epoch."""
        return self.steps or LONG * MODELS[name].steps

    def own_data(self, name: str) -> tuple[Any, Any]:
        """Returns an epoch of this rank's own data."""
        return random_data(name, MODELS[name].batch * self.num_steps(name), seed=self.rank)

    def global_data(self, name: str) -> tuple[Any, Any]:
        """Returns an epoch of all ranks' data, the same on each."""
        return random_data(name, MODELS[name].batch * self.num_steps(name) * self.ranks)

    def report(self, name: str, times: FitTimes, weights: Sequence[Any]) -> None:
        """Says how long the steps took, and what the weights are now.

        Args:
            name: str, the model.
            times: `FitTimes`, of the fit that is measured.
            weights: sequence of NumPy arrays, the trainable ones. Statistics of batch normalisation are each rank's
                own in some frameworks.
        """
        line = {
            "model": name,
            "seconds": dataclasses.asdict(times),
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
