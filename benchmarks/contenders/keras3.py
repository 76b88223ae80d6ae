"""Keras 3 on TensorFlow: plain, and in `kdist.scope()` on one rank or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from contenders.keras_fit import train
from contenders.task import Task


def plain(task: Task) -> None:
    """Keras alone."""
    import keras

    for name in task.models:
        train(task, keras, name, task.global_data(name))


def in_scope(task: Task) -> None:
    """The same script in the scope. All ranks are given all data, and kdist shares it out."""
    _in_scope(task, list)


def in_scope_checked(task: Task) -> None:
    """With a comparison of the ranks' state after each step."""

    def callbacks() -> Sequence[Any]:
        from kdist.callbacks import ReplicaCheck

        return [ReplicaCheck(every=1)]

    _in_scope(task, callbacks)


def _in_scope(task: Task, callbacks: Callable[[], Sequence[Any]]) -> None:
    import keras

    import kdist

    with kdist.scope(scale_lr=None):
        for name in task.models:
            train(task, keras, name, task.global_data(name), callbacks=callbacks())
