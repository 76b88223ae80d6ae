"""Keras 3 on TensorFlow: plain, and in `kdist.scope()` on one rank or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from contenders.keras_fit import train
from contenders.task import Task


def plain(task: Task) -> None:
    """Keras alone."""
    import keras

    for name in task.models:
        train(task, keras, name, task.global_data(name))


def side_by_side(task: Task, **options: Any) -> None:
    """Keras alone in each process, in all of them the same training: they share nothing but the machine.

    They begin each fit together: of two that have drifted apart, one would be measured while the other rests.
    """
    import keras
    from mpi4py import MPI

    keras.utils.set_random_seed(0)
    for name in task.models:
        data = dataclasses.replace(task, ranks=1).global_data(name)
        train(task, keras, name, data, meet=MPI.COMM_WORLD.Barrier, **options)


def side_by_side_in_step(task: Task) -> None:
    """They wait for each other after each step, as ranks do, and exchange nothing."""
    import keras
    from mpi4py import MPI

    class Waits(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            MPI.COMM_WORLD.Barrier()

    side_by_side(task, callbacks=[Waits()])


def side_by_side_uncompiled(task: Task) -> None:
    """Without XLA, which Keras uses on a GPU by itself."""
    side_by_side(task, jit_compile=False)


def in_scope(task: Task) -> None:
    """The same script in the scope. All ranks are given all data, and kdist shares it out."""
    _in_scope(task, list)


def in_scope_compiled(task: Task) -> None:
    """With XLA, which Keras leaves out on several ranks by itself."""
    _in_scope(task, list, jit_compile=True)


def in_scope_checked(task: Task) -> None:
    """With a comparison of the ranks' state after each step."""

    def callbacks() -> Sequence[Any]:
        from kdist.callbacks import ReplicaCheck

        return [ReplicaCheck(every=1)]

    _in_scope(task, callbacks)


def _in_scope(task: Task, callbacks: Callable[[], Sequence[Any]], **options: Any) -> None:
    import keras

    import kdist

    with kdist.scope(scale_lr=None):
        for name in task.models:
            train(task, keras, name, task.global_data(name), callbacks=callbacks(), **options)
