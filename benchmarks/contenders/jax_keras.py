"""Keras 3 on JAX: plain, and with `keras.distribution.DataParallel` over processes."""

from __future__ import annotations

import json
import os

import keras

from contenders.keras_fit import train
from contenders.task import Task


def plain(task: Task) -> None:
    """Keras on JAX alone."""
    for name in task.models:
        train(task, keras, name, task.own_data(name))


def data_parallel(task: Task) -> None:
    """Keras' DataParallel, each rank on data of its own: Keras takes what a process is given for its part."""
    addresses = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
    keras.distribution.initialize(addresses[0], task.ranks, task.rank)
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    plain(task)
